"""Made-up facts of machines for doctor: good ones, and ways to change one thing."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from baton.connect import Service
from operations.doctor.facts import GIB, Facts, Host, Model, Nvidia, Shape, Shard, Worker
from operations.doctor.probes import parse_gpus, planned
from workers.flags import DisaggregationMode as Mode
from workers.flags import EngineName

CONFIGS = Path("engine_configs/gpt-oss-120b")
SMI = Path("tests/data/nvidia_smi")
SHAPE_120B = Shape(model_type="gpt_oss", num_hidden_layers=36, max_position_embeddings=131_072)
NUM_SHARDS = 15
SHARD_BYTES = 65_248_815_744 // NUM_SHARDS
FILES = frozenset({"config.json", "tokenizer.json", "generation_config.json", "model.safetensors.index.json"})
MODEL_120B = Model(
    path="/models/gpt-oss-120b", is_folder=True, files=FILES, shape=SHAPE_120B,
    shards=tuple(
        Shard(name=f"model-{i:05}-of-00014.safetensors", size_bytes=SHARD_BYTES, whole_bytes=SHARD_BYTES)
        for i in range(NUM_SHARDS)
    ),
)  # fmt: skip
DEMO = Model(
    path="models/demo", is_folder=True, files=FILES,
    shape=Shape(model_type="gpt_oss", num_hidden_layers=8, max_position_embeddings=4096),
    shards=(Shard(name="model.safetensors", size_bytes=17_923_272, whole_bytes=17_923_272),),
)  # fmt: skip
NODE_HOST = Host(memory_bytes=2048 * GIB, memory_free_bytes=1900 * GIB, shm_bytes=1024 * GIB)
ETCD = Service(name="etcd", url="http://127.0.0.1:2379")
NATS = Service(name="NATS", url="nats://127.0.0.1:4222")


def smi(name: str) -> str:
    return (SMI / name).read_text()


B200X8 = Nvidia(gpus=parse_gpus(smi("b200x8_query.csv")))


def worker_of(mode: Mode, gpus: str | None, path: Path, engine: EngineName = "trtllm") -> Worker:
    (worker,) = planned(engine, mode, [gpus], path, "")
    return worker


def with_yaml(worker: Worker, text: str, line: str = "") -> Worker:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        (changed,) = planned("trtllm", worker.mode, [worker.gpus], Path(file.name), line)
    return changed


def as_yaml(leaves: dict[str, object]) -> str:
    nested: dict[str, object] = {}
    for path, value in leaves.items():
        *sections, name = path.split(".")
        level: Any = nested
        for section in sections:
            level = level.setdefault(section, {})
        level[name] = value
    return json.dumps(nested)


def b200_node() -> Facts:
    """The guide's: one node of eight B200, prefill on 0-3, decode on 4-7."""
    workers = (
        worker_of("prefill", "0,1,2,3", CONFIGS / "prefill.yaml"),
        worker_of("decode", "4,5,6,7", CONFIGS / "decode.yaml"),
    )
    return Facts(host=NODE_HOST, nvidia=B200X8, model=MODEL_120B, workers=workers, services=(ETCD, NATS))


def h200_agg() -> Facts:
    """One H200, as recorded, with an aggregated worker."""
    nvidia = Nvidia(gpus=parse_gpus(smi("h200_query.csv")))
    workers = (worker_of("agg", "0", CONFIGS / "agg_h200_low_latency.yaml"),)
    return Facts(host=NODE_HOST, nvidia=nvidia, model=MODEL_120B, workers=workers)


def one_gpu(kv_bytes: int | None) -> Facts:
    """One H200 with gpt-oss-20b's prefill and decode on vLLM."""
    shards = (Shard(name="model.safetensors", size_bytes=13_761_300_984, whole_bytes=13_761_300_984),)
    model = replace(MODEL_120B, shape=replace(SHAPE_120B, num_hidden_layers=24), shards=shards)
    line = "" if kv_bytes is None else f'--override-engine-args {{"kv_cache_memory_bytes":{kv_bytes}}}'
    folder = Path("engine_configs/vllm/gpt-oss-20b")
    modes: tuple[Mode, ...] = ("prefill", "decode")
    workers = tuple(w for mode in modes for w in planned("vllm", mode, ["0"], folder / f"{mode}.yaml", line))
    return replace(h200_agg(), model=model, workers=workers, engine="vllm")


def spark() -> Facts:
    """DGX Spark: the GPU's memory is the machine's, and nvidia-smi does not tell it."""
    host = replace(NODE_HOST, memory_bytes=127_600_748 * 1024, memory_free_bytes=118_566_368 * 1024)
    nvidia = Nvidia(gpus=parse_gpus(smi("spark_query.csv")))
    workers = (worker_of("agg", None, CONFIGS / "agg_spark.yaml"),)
    return Facts(host=host, nvidia=nvidia, model=MODEL_120B, workers=workers)


def laptop() -> Facts:
    """No GPU, small limits, the demo model: `make up`."""
    host = Host(memory_bytes=16 * GIB, memory_free_bytes=9 * GIB, memlock_bytes=8 << 20, shm_bytes=64 << 20)
    demo = Path("engine_configs/demo")
    nvidia = Nvidia(problem="nvidia-smi is not installed")
    workers = (
        worker_of("prefill", None, demo / "prefill.yaml", "embedded"),
        worker_of("decode", None, demo / "decode.yaml", "embedded"),
    )
    return Facts(host=host, nvidia=nvidia, model=DEMO, workers=workers, engine="embedded")


def host_of(facts: Facts, **changes: object) -> Facts:
    return replace(facts, host=replace(facts.host, **changes))


def model_of(facts: Facts, **changes: object) -> Facts:
    return replace(facts, model=replace(facts.model, **changes))


def gpu_of(facts: Facts, index: int, **changes: object) -> Facts:
    gpus = tuple(replace(gpu, **changes) if gpu.index == index else gpu for gpu in facts.nvidia.gpus)
    return replace(facts, nvidia=replace(facts.nvidia, gpus=gpus))


def set_of(facts: Facts, mode: Mode, **changes: object) -> Facts:
    workers = tuple(replace(w, **changes) if w.mode == mode else w for w in facts.workers)
    return replace(facts, workers=workers)


def reread(facts: Facts, mode: Mode, change: Callable[[Worker], Worker]) -> Facts:
    return replace(facts, workers=tuple(change(w) if w.mode == mode else w for w in facts.workers))


def yaml_of(facts: Facts, mode: Mode, values: dict[str, object], *, without: str = "") -> Facts:
    """The worker's YAML with other leaves, or with all leaves of one section taken out."""

    def changed(worker: Worker) -> Worker:
        kept = {k: v for k, v in worker.given.items() if not (without and k.startswith(without))}
        return with_yaml(worker, as_yaml(kept | values))

    return reread(facts, mode, changed)


def typed_of(facts: Facts, mode: Mode, line: str) -> Facts:
    return reread(facts, mode, lambda worker: with_yaml(worker, as_yaml(worker.given), line))


def nixl(facts: Facts, mode: Mode, runtime: str) -> Facts:
    leaves = {"cache_transceiver_config": {"backend": "NIXL", "transceiver_runtime": runtime}}
    return reread(facts, mode, lambda worker: with_yaml(worker, json.dumps(leaves)))


def env_of(facts: Facts, **variables: str) -> Facts:
    return host_of(facts, environment=variables)


def yaml_text(facts: Facts, text: str) -> Facts:
    return reread(facts, "decode", lambda worker: with_yaml(worker, text))


def shard_of(facts: Facts, **changes: object) -> Facts:
    first, *others = facts.model.shards
    return model_of(facts, shards=(replace(first, **changes), *others))


def service_of(facts: Facts, name: str, **changes: object) -> Facts:
    changed = tuple(replace(s, **changes) if s.name == name else s for s in facts.services)
    return replace(facts, services=changed)


def demo_with(text: str) -> Facts:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return replace(laptop(), workers=(worker_of("agg", None, Path(file.name), "embedded"),))
