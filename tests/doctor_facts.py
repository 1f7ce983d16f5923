"""Made-up facts of machines for doctor: good ones, and ways to change one thing."""

import json
import tempfile
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from operations.doctor.facts import GIB, Facts, Model, Worker
from operations.doctor.probes import parse_gpus, planned
from workers.flags import DisaggregationMode as Mode
from workers.flags import EngineName

CONFIGS = Path("engine_configs/gpt-oss-120b")
SMI = Path("tests/data/nvidia_smi")
SPARKS_MEMORY = "MemTotal:       127600748 kB\nMemAvailable:   118566368 kB\n"
MODEL_120B = Model(path="/models/gpt-oss-120b", num_layers=36, weight_bytes=65_248_815_744)
MODEL_20B = Model(path="/models/gpt-oss-20b", num_layers=24, weight_bytes=13_761_300_984)
DEMO = Model(path="models/demo", num_layers=8, weight_bytes=17_923_272)


def smi(name: str) -> str:
    return (SMI / name).read_text()


B200X8 = parse_gpus(smi("b200x8_query.csv"), "")


def worker_of(mode: Mode, gpus: str | None, path: Path, engine: EngineName = "trtllm") -> Worker:
    (worker,) = planned(engine, mode, [gpus], path, "")
    return worker


def worker_of_text(mode: Mode, text: str, engine: EngineName = "trtllm") -> Worker:
    """A worker with this YAML."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return worker_of(mode, None, Path(file.name), engine)


def b200_node() -> Facts:
    """The guide's: one node of eight B200, prefill on 0-3, decode on 4-7."""
    workers = (
        worker_of("prefill", "0,1,2,3", CONFIGS / "prefill.yaml"),
        worker_of("decode", "4,5,6,7", CONFIGS / "decode.yaml"),
    )
    return Facts(gpus=B200X8, model=MODEL_120B, workers=workers, shm_bytes=1024 * GIB)


def h200_agg() -> Facts:
    """One H200, as recorded, with an aggregated worker."""
    workers = (worker_of("agg", "0", CONFIGS / "agg_h200_low_latency.yaml"),)
    return replace(b200_node(), gpus=parse_gpus(smi("h200_query.csv"), ""), workers=workers)


def one_gpu(kv_bytes: float | None) -> Facts:
    """One H200 with gpt-oss-20b's prefill and decode on vLLM."""
    line = "" if kv_bytes is None else f'--override-engine-args {{"kv_cache_memory_bytes":{kv_bytes}}}'
    folder = Path("engine_configs/vllm/gpt-oss-20b")
    modes: tuple[Mode, ...] = ("prefill", "decode")
    workers = tuple(w for mode in modes for w in planned("vllm", mode, ["0"], folder / f"{mode}.yaml", line))
    return replace(h200_agg(), model=MODEL_20B, workers=workers, engine="vllm")


def spark() -> Facts:
    """DGX Spark: the GPU's memory is the machine's, and nvidia-smi does not tell it."""
    workers = (worker_of("agg", None, CONFIGS / "agg_spark.yaml"),)
    return replace(b200_node(), gpus=parse_gpus(smi("spark_query.csv"), SPARKS_MEMORY), workers=workers)


def laptop() -> Facts:
    """No GPU, small limits, the demo model: `make up`."""
    demo = Path("engine_configs/demo")
    return Facts(
        gpus=(),
        gpu_problem="nvidia-smi is not installed",
        model=DEMO,
        workers=(
            worker_of("prefill", None, demo / "prefill.yaml", "embedded"),
            worker_of("decode", None, demo / "decode.yaml", "embedded"),
        ),
        engine="embedded",
        memlock_bytes=8 << 20,
        shm_bytes=64 << 20,
    )


def model_of(facts: Facts, **changes: object) -> Facts:
    return replace(facts, model=replace(facts.model, **changes))


def gpu_of(facts: Facts, index: int, **changes: object) -> Facts:
    gpus = tuple(replace(gpu, **changes) if gpu.index == index else gpu for gpu in facts.gpus)
    return replace(facts, gpus=gpus)


def set_of(facts: Facts, mode: Mode, **changes: object) -> Facts:
    workers = tuple(replace(w, **changes) if w.mode == mode else w for w in facts.workers)
    return replace(facts, workers=workers)


def typed_of(facts: Facts, mode: Mode, line: str) -> Facts:
    """A worker of the shipped YAML with these flags."""
    (worker,) = planned("trtllm", mode, [None], CONFIGS / f"{mode}.yaml", line)
    return set_of(facts, mode, given=worker.given, refusal=worker.refusal)


def given_of(facts: Facts, mode: Mode, values: dict[str, object]) -> Facts:
    """A worker of the shipped YAML with other leaves."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        level = nested
        for section in sections:
            level = level.setdefault(section, {})
        level[name] = value
    text = json.dumps(nested, separators=(",", ":")).replace(" ", r"\u0020")  # flags are split at spaces
    return typed_of(facts, mode, f"--override-engine-args {text}")


def demo_with(text: str) -> Facts:
    return replace(laptop(), workers=(worker_of_text("agg", text, "embedded"),))
