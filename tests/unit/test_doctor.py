"""Doctor's checks over made-up facts: each broken set-up is found, good ones are left alone."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from baton.doctor.check_memory import budget
from baton.doctor.command import examine
from baton.doctor.engine_yaml import read_engine_yaml
from baton.doctor.facts import (
    GIB,
    EngineYaml,
    Facts,
    Gpu,
    Host,
    Model,
    Nvidia,
    Role,
    Service,
    Shape,
    Shard,
    Worker,
)
from baton.doctor.findings import Finding, Severity, text
from baton.doctor.probe_gpus import parse_gpus, parse_matrix

CONFIGS = Path("engine_configs/gpt-oss-120b")
SMI = Path("tests/data/nvidia_smi")
SHAPE_120B = Shape(
    model_type="gpt_oss", num_layers=36, num_heads=64, num_kv_heads=8, head_dim=64, num_experts=128,
    max_positions=131_072,
)  # fmt: skip
NUM_SHARDS = 15
SHARD_BYTES = 65_248_815_744 // NUM_SHARDS
FILES = frozenset({"config.json", "tokenizer.json", "generation_config.json"})
MODEL_120B = Model(
    path="/models/gpt-oss-120b", is_folder=True, files=FILES, shape=SHAPE_120B, disk_free_bytes=900 * GIB,
    shards=tuple(
        Shard(name=f"model-{i:05}-of-00014.safetensors", size_bytes=SHARD_BYTES, whole_bytes=SHARD_BYTES)
        for i in range(NUM_SHARDS)
    ),
)  # fmt: skip
DEMO = Model(
    path="models/demo", is_folder=True, files=FILES, disk_free_bytes=50 * GIB,
    shape=Shape(model_type="gpt_oss", num_layers=8, num_heads=8, num_kv_heads=2, head_dim=64, num_experts=4,
                max_positions=4096),
    shards=(Shard(name="model.safetensors", size_bytes=17_923_272, whole_bytes=17_923_272),),
)  # fmt: skip
NODE_HOST = Host(
    memory_bytes=2048 * GIB, memory_free_bytes=1900 * GIB, nofile=65536, shm_bytes=1024 * GIB,
    in_container=True, can_ptrace=True, has_tensorrt_llm=True,
)  # fmt: skip
ETCD = Service(name="etcd", url="http://127.0.0.1:2379", latency_s=0.0006, clock_ahead_s=0.4)
NATS = Service(name="NATS", url="nats://127.0.0.1:4222", latency_s=0.0001, max_payload_bytes=15_728_640)


def _smi(name: str) -> str:
    return (SMI / name).read_text()


B200X8 = Nvidia(
    gpus=parse_gpus(_smi("b200x8_query.csv")),
    links=parse_matrix(_smi("b200x8_topo.txt")),
    peers=parse_matrix(_smi("b200x8_p2p.txt")),
)


def _worker(role: Role, gpus: str | None, name: str) -> Worker:
    return Worker(role=role, gpus=gpus, yaml=read_engine_yaml(CONFIGS / f"{name}.yaml"))


def b200_node() -> Facts:
    """The guide's: one node of eight B200, prefill on 0-3, decode on 4-7."""
    workers = (_worker("prefill", "0,1,2,3", "prefill"), _worker("decode", "4,5,6,7", "decode"))
    return Facts(host=NODE_HOST, nvidia=B200X8, model=MODEL_120B, workers=workers, services=(ETCD, NATS))


def h200_agg() -> Facts:
    """One H200, as recorded, with an aggregated worker."""
    nvidia = Nvidia(gpus=parse_gpus(_smi("h200_query.csv")))
    return Facts(
        host=NODE_HOST,
        nvidia=nvidia,
        model=MODEL_120B,
        workers=(_worker("agg", "0", "agg_h200_low_latency"),),
    )


def spark() -> Facts:
    """DGX Spark: the GPU's memory is the machine's, and nvidia-smi does not tell it."""
    host = replace(NODE_HOST, memory_bytes=127_600_748 * 1024, memory_free_bytes=118_566_368 * 1024)
    nvidia = Nvidia(gpus=parse_gpus(_smi("spark_query.csv")))
    return Facts(host=host, nvidia=nvidia, model=MODEL_120B, workers=(_worker("agg", None, "agg_spark"),))


def laptop() -> Facts:
    """No GPU, small limits, the demo model: `make up`."""
    host = Host(
        memory_bytes=16 * GIB, memory_free_bytes=9 * GIB, memlock_bytes=8 << 20, nofile=1024,
        shm_bytes=64 << 20, ptrace_scope=1,
    )  # fmt: skip
    demo = Path("engine_configs/demo")
    workers = (
        Worker(role="prefill", yaml=read_engine_yaml(demo / "prefill.yaml")),
        Worker(role="decode", yaml=read_engine_yaml(demo / "decode.yaml")),
    )
    return Facts(host=host, nvidia=Nvidia(problem="nvidia-smi is not installed"), model=DEMO, workers=workers)


def _host(facts: Facts, **changes: object) -> Facts:
    return replace(facts, host=replace(facts.host, **changes))


def _model(facts: Facts, **changes: object) -> Facts:
    return replace(facts, model=replace(facts.model, **changes))


def _gpu(facts: Facts, index: int, **changes: object) -> Facts:
    gpus = tuple(replace(gpu, **changes) if gpu.index == index else gpu for gpu in facts.nvidia.gpus)
    return replace(facts, nvidia=replace(facts.nvidia, gpus=gpus))


def _set(facts: Facts, role: Role, **changes: object) -> Facts:
    workers = tuple(replace(w, **changes) if w.role == role else w for w in facts.workers)
    return replace(facts, workers=workers)


def _yaml(facts: Facts, role: Role, values: dict[str, object], *, without: str = "") -> Facts:
    """The role's YAML with other leaves, or with all leaves of one section taken out."""
    worker = facts.role(role)
    assert worker is not None
    assert worker.yaml is not None
    kept = {k: v for k, v in worker.yaml.values.items() if not (without and k.startswith(without))}
    return _set(facts, role, yaml=replace(worker.yaml, values=kept | values))


def _only(facts: Facts, role: Role) -> Facts:
    return replace(facts, workers=tuple(w for w in facts.workers if w.role == role))


def _shard(facts: Facts, **changes: object) -> Facts:
    first, *others = facts.model.shards
    return _model(facts, shards=(replace(first, **changes), *others))


def _service(facts: Facts, name: str, **changes: object) -> Facts:
    changed = tuple(replace(s, **changes) if s.name == name else s for s in facts.services)
    return replace(facts, services=changed)


def _rtx(facts: Facts) -> Facts:
    """Two cards in slots: no NVLink, no peer access."""
    gpu = Gpu(
        index=0, uuid="GPU-a", name="NVIDIA GeForce RTX 5090", total_bytes=32 * GIB, free_bytes=31 * GIB,
        driver="580.95.05", compute=(12, 0),
    )  # fmt: skip
    return replace(
        _only(facts, "prefill"),
        nvidia=Nvidia(
            gpus=(gpu, replace(gpu, index=1, uuid="GPU-b")),
            links=parse_matrix(_smi("rtx5090x2_topo.txt")),
            peers=parse_matrix(_smi("rtx5090x2_p2p.txt")),
        ),
    )


def _without_nvlink(facts: Facts) -> Facts:
    links = parse_matrix(_smi("b200x8_topo_gpu2_without_nvlink.txt"))
    return replace(facts, nvidia=replace(facts.nvidia, links=links))


GOOD: dict[str, Callable[[], Facts]] = {"B200": b200_node, "H200": h200_agg, "Spark": spark, "laptop": laptop}
E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE
CACHE, KV = "cache_transceiver_config", "kv_cache_config"
FRACTION = f"{KV}.free_gpu_memory_fraction"

BROKEN: list[tuple[str, str, Severity, Callable[[Facts], Facts]]] = [
    ("no driver", "gpu-none", E, lambda f: replace(f, nvidia=Nvidia(problem="couldn't communicate"))),
    ("old driver", "driver-old", E, lambda f: _gpu(f, 0, driver="550.90.07")),
    ("old driver for Blackwell", "driver-old", E, lambda f: _gpu(f, 5, driver="570.86.10")),
    ("A100", "gpu-old", E, lambda f: _gpu(f, 1, compute=(8, 0), name="NVIDIA A100-SXM4-80GB")),
    ("another process on a GPU", "gpu-busy", W, lambda f: _gpu(f, 6, free_bytes=120 * GIB)),
    ("range of GPUs", "gpu-list", E, lambda f: _set(f, "prefill", gpus="0-3")),
    ("spaces in the list", "gpu-list", E, lambda f: _set(f, "decode", gpus="4, 5, 6, 7")),
    ("trailing comma", "gpu-list", E, lambda f: _set(f, "decode", gpus="4,5,6,7,")),
    ("empty list", "gpu-list", E, lambda f: _set(f, "decode", gpus="")),
    ("the same GPU twice", "gpu-twice", E, lambda f: _set(f, "prefill", gpus="0,1,1,2")),
    ("GPU 8 of 8", "gpu-absent", E, lambda f: _set(f, "decode", gpus="5,6,7,8")),
    ("UUID of another node", "gpu-absent", E, lambda f: _set(f, "decode", gpus="GPU-99999999,5,6,7")),
    ("shared GPU", "gpu-shared", E, lambda f: _set(f, "decode", gpus="3,4,5,6")),
    ("shared by UUID", "gpu-shared", E, lambda f: _set(f, "decode", gpus="GPU-00000003,4,5,6")),
    ("no list for decode", "gpu-shared", E, lambda f: _set(f, "decode", gpus=None)),
    ("too few for TP", "gpu-too-few", E, lambda f: _set(f, "decode", gpus="4,5")),
    ("too few for PP", "gpu-too-few", E, lambda f: _yaml(f, "decode", {"pipeline_parallel_size": 2})),
    ("idle GPU", "gpu-idle", W, lambda f: _yaml(f, "decode", {"tensor_parallel_size": 2})),
    ("kinds mixed", "gpu-mixed", W, lambda f: _gpu(f, 2, name="NVIDIA H100")),
    ("MIG", "gpu-mig", E, lambda f: _gpu(f, 4, mig=True)),
    ("a GPU off NVLink", "gpu-no-nvlink", W, _without_nvlink),
    ("no peer access", "gpu-no-peer", W, _rtx),
    ("no model folder", "model-absent", E, lambda f: _model(f, is_folder=False)),
    ("no token", "token-missing", N, lambda f: _model(f, is_folder=False)),
    ("disk full", "disk-full", E, lambda f: _model(f, is_folder=False, disk_free_bytes=20 * GIB)),
    ("no config", "file-missing", E, lambda f: _model(f, files=FILES - {"config.json"}, shape=None)),
    ("bad config", "config-bad", E, lambda f: _model(f, config_problem="truncated", shape=None)),
    ("no tokenizer", "file-missing", E, lambda f: _model(f, files=FILES - {"tokenizer.json"})),
    ("bad tokenizer", "tokenizer-bad", E, lambda f: _model(f, tokenizer_problem="truncated")),
    ("no generation config", "generation-config-missing", W,
     lambda f: _model(f, files=FILES - {"generation_config.json"})),
    ("bad index", "index-bad", E, lambda f: _model(f, index_problem="malformed", shards=())),
    ("no weights", "file-missing", E, lambda f: _model(f, shards=())),
    ("missing shard", "shard-missing", E, lambda f: _shard(f, size_bytes=None, whole_bytes=None)),
    ("shard cut short", "shard-broken", E, lambda f: _shard(f, size_bytes=SHARD_BYTES - 1)),
    ("git-lfs pointer", "shard-broken", E, lambda f: _shard(f, size_bytes=135, whole_bytes=None)),
    ("unfinished download", "download-unfinished", N,
     lambda f: _shard(_model(f, num_unfinished=1), size_bytes=None, whole_bytes=None)),
    ("120b on a 24 GB card", "memory-weights", E,
     lambda f: _gpu(_set(_yaml(f, "decode", {"tensor_parallel_size": 1}), "decode", gpus="7"), 7,
                    total_bytes=24 * GIB, free_bytes=23 * GIB)),
    ("memory taken", "memory-taken", E, lambda f: _gpu(f, 6, free_bytes=10 * GIB)),
    ("KV below one request", "kv-one-request", E, lambda f: _yaml(f, "decode", {f"{KV}.max_tokens": 8192})),
    ("KV below the context", "kv-below-context", W,
     lambda f: _yaml(f, "decode", {"max_seq_len": None, f"{KV}.max_tokens": 86_720})),
    ("batch above the KV", "kv-thin", W, lambda f: _yaml(f, "decode", {"max_batch_size": 4096})),
    ("buffer above the headroom", "buffer-memory", E,
     lambda f: _yaml(f, "decode", {FRACTION: 0.99, f"{CACHE}.max_tokens_in_buffer": 131_072})),
    ("no such YAML", "yaml-bad", E,
     lambda f: _set(f, "decode", yaml=read_engine_yaml(Path("none.yaml")))),
    ("key given twice", "yaml-twice", E,
     lambda f: _set(f, "decode", yaml=EngineYaml(path="d.yaml", duplicates=("d.yaml:3: max_seq_len",)))),
    ("key of an old release", "yaml-old-key", E,
     lambda f: _yaml(f, "decode", {"enable_mixed_sampler": True})),
    ("old section", "yaml-old-key", E, lambda f: _yaml(f, "decode", {"pytorch_backend_config.x": 1})),
    ("TP as a word", "yaml-value", E, lambda f: _yaml(f, "decode", {"tensor_parallel_size": "four"})),
    ("batch of 0", "yaml-value", E, lambda f: _yaml(f, "prefill", {"max_batch_size": 0})),
    ("fraction in per cent", "kv-fraction", E, lambda f: _yaml(f, "decode", {FRACTION: 90})),
    ("TP 3", "tp-heads", E,
     lambda f: _set(_yaml(f, "decode", {"tensor_parallel_size": 3}), "decode", gpus="4,5,6")),
    ("EP 3", "ep-experts", E, lambda f: _yaml(f, "decode", {"moe_expert_parallel_size": 3})),
    ("MoE in lower case", "moe-case", E, lambda f: _yaml(f, "decode", {"moe_config.backend": "cutlass"})),
    ("no transceiver", "transceiver-none", E, lambda f: _yaml(f, "decode", {}, without=CACHE)),
    ("unknown transceiver", "transceiver-unknown", E,
     lambda f: _yaml(f, "prefill", {f"{CACHE}.backend": "RDMA"})),
    ("transceiver in lower case", "transceiver-case", W,
     lambda f: _yaml(f, "prefill", {f"{CACHE}.backend": "ucx"})),
    ("buffer below the prompt", "buffer-short", E,
     lambda f: _yaml(f, "prefill", {f"{CACHE}.max_tokens_in_buffer": 8192})),
    ("buffer below the context", "buffer-short", E, lambda f: _yaml(f, "prefill", {"max_seq_len": None})),
    ("no buffer", "buffer-unset", W, lambda f: _yaml(f, "prefill", {f"{CACHE}.max_tokens_in_buffer": None})),
    ("overlap on prefill", "overlap-prefill", E,
     lambda f: _yaml(f, "prefill", {"disable_overlap_scheduler": False})),
    ("dtypes differ", "pair-dtype", E, lambda f: _yaml(f, "decode", {f"{KV}.dtype": "fp8"})),
    ("block sizes differ", "pair-block", E, lambda f: _yaml(f, "decode", {f"{KV}.tokens_per_block": 64})),
    ("transceivers differ", "pair-backend", E, lambda f: _yaml(f, "decode", {f"{CACHE}.backend": "NIXL"})),
    ("runtimes differ", "pair-runtime", E,
     lambda f: _yaml(f, "decode", {f"{CACHE}.transceiver_runtime": "PYTHON"})),
    ("beam search", "pair-beam", E, lambda f: _yaml(f, "decode", {"max_beam_width": 4})),
    ("decode shorter", "pair-length", E, lambda f: _yaml(f, "decode", {"max_seq_len": 32_768})),
    ("prompts unchunked", "prefill-chunks", E,
     lambda f: _yaml(f, "prefill", {"enable_chunked_prefill": False})),
    ("etcd down", "etcd-down", E, lambda f: _service(f, "etcd", problem="Connection refused")),
    ("NATS down", "nats-down", E, lambda f: _service(f, "NATS", problem="timed out")),
    ("etcd far away", "latency", W, lambda f: _service(f, "etcd", latency_s=0.12)),
    ("small NATS messages", "nats-payload", W, lambda f: _service(f, "NATS", max_payload_bytes=65_536)),
    ("clock skewed", "clock-skew", W, lambda f: _service(f, "etcd", clock_ahead_s=-90.0)),
    ("clock of 1970", "clock", E, lambda f: _host(f, year=1970)),
    ("port taken", "port-taken", E, lambda f: replace(f, http_port_problem="Address already in use")),
    ("no such port", "port-bad", E, lambda f: replace(f, http_port=80_000)),
    ("address of another machine", "host-bad", E, lambda f: replace(f, host_problem="Cannot assign address")),
    ("loopback, several nodes", "host-loopback", W,
     lambda f: _service(f, "etcd", url="http://10.0.0.1:2379")),
    ("memlock", "memlock", W, lambda f: _host(f, memlock_bytes=8 << 20)),
    ("few open files", "nofile", W, lambda f: _host(f, nofile=1024)),
    ("docker's shm", "shm", E, lambda f: _host(f, shm_bytes=64 << 20)),
    ("small shm", "shm", W, lambda f: _host(f, shm_bytes=4 * GIB)),
    ("PIDs apart", "pid-namespace", W, lambda f: _only(_host(f, pid_namespace=4026532999), "decode")),
    ("IPC apart", "ipc-namespace", W, lambda f: _only(_host(f, ipc_namespace=4026532998), "decode")),
    ("no ptrace", "ptrace", W, lambda f: _host(f, ptrace_scope=1, can_ptrace=False)),
    ("container without TensorRT-LLM", "trtllm-missing", W, lambda f: _host(f, has_tensorrt_llm=False)),
    ("host without docker", "trtllm-missing", W,
     lambda f: _host(f, has_tensorrt_llm=False, in_container=False)),
    ("docker without toolkit", "toolkit-missing", E,
     lambda f: _host(f, has_tensorrt_llm=False, in_container=False, has_docker=True)),
]  # fmt: skip

OTHERS: list[tuple[str, str, Severity, Callable[[], Facts]]] = [
    ("TRTLLM kernels on Hopper", "moe-hopper", E,
     lambda: _yaml(h200_agg(), "agg", {"moe_config.backend": "TRTLLM"})),
    ("CUTLASS on Hopper", "moe-hopper", W,
     lambda: _yaml(h200_agg(), "agg", {"moe_config.backend": "CUTLASS"})),
    ("Spark with its memory taken", "memory-taken", E, lambda: _host(spark(), memory_free_bytes=40 * GIB)),
    ("120b on a laptop", "gpu-none", E, lambda: replace(laptop(), model=MODEL_120B)),
    ("demo pair of two block sizes", "pair-block", E,
     lambda: _yaml(laptop(), "decode", {f"{KV}.tokens_per_block": 16})),
    ("laptop with its port taken", "port-taken", E,
     lambda: replace(laptop(), http_port_problem="Address already in use")),
]  # fmt: skip


def _found(facts: Facts) -> dict[str, Finding]:
    return {finding.code: finding for finding in examine(facts).findings}


@pytest.mark.parametrize(
    ("code", "severity", "breaking"), [row[1:] for row in BROKEN], ids=[r[0] for r in BROKEN]
)
def test_a_broken_b200_node_is_found(
    code: str, severity: Severity, breaking: Callable[[Facts], Facts]
) -> None:
    finding = _found(breaking(b200_node()))[code]
    assert finding.severity == severity
    assert all((finding.fact, finding.breaks, finding.repair))


@pytest.mark.parametrize(
    ("code", "severity", "facts"), [row[1:] for row in OTHERS], ids=[r[0] for r in OTHERS]
)
def test_other_broken_machines_are_found(code: str, severity: Severity, facts: Callable[[], Facts]) -> None:
    assert _found(facts())[code].severity == severity


@pytest.mark.parametrize("machine", GOOD)
def test_a_good_machine_is_left_alone(machine: str) -> None:
    found = examine(GOOD[machine]()).findings
    assert [f for f in found if f.severity != Severity.NOTE] == []


def test_a_laptop_is_told_one_thing() -> None:
    assert [finding.code for finding in examine(laptop()).findings] == ["gpu-none"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("agg_*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_configs_are_good_on_the_machine_they_are_for(path: Path) -> None:
    worker = Worker(role="agg", yaml=read_engine_yaml(path))
    facts = {"h200": h200_agg, "spark": spark}.get(path.stem.split("_")[1], b200_node)()
    gpus = ",".join(map(str, range(worker.tensor_parallel_size)))
    facts = replace(facts, workers=(replace(worker, gpus=gpus),), services=())
    assert text(examine(facts)).splitlines()[-1] == "result   nothing found"


def test_the_table_reaches_every_code_that_the_checks_have() -> None:
    source = "".join(path.read_text() for path in sorted(Path("baton/doctor").glob("check_*.py")))
    codes = set(re.findall(r'(?:error|warning|note)\)?\(\s*"([a-z-]+)"', source))
    assert len(codes) > 60
    assert codes - {code for _, code, *_ in BROKEN + OTHERS} == set()


_KEYS = sorted(
    {key for path in CONFIGS.glob("*.yaml") for key in read_engine_yaml(path).values}
    | {"pipeline_parallel_size", "max_beam_width", f"{KV}.max_tokens", f"{KV}.tokens_per_block"}
)
_NUMBERS = st.integers() | st.just(10**400) | st.floats()
_LEAVES = st.none() | st.booleans() | _NUMBERS | st.text() | st.lists(st.integers())


@given(st.dictionaries(st.sampled_from(_KEYS), _LEAVES), st.text("0123456789,-; GPUx", max_size=12))
def test_no_yaml_and_no_list_makes_doctor_itself_fail(values: dict[str, object], gpus: str) -> None:
    facts = _set(_yaml(b200_node(), "decode", values), "decode", gpus=gpus)
    assert text(examine(facts))
    assert text(examine(_yaml(facts, "prefill", values)))


def test_kv_of_gpt_oss_120b_takes_73728_bytes_a_token() -> None:
    assert SHAPE_120B.kv_bytes_per_token() == 73_728
    assert SHAPE_120B.kv_bytes_per_token("fp8") == 36_864


def test_the_sparks_kv_comes_near_what_the_guides_log_measured() -> None:
    """86,720 tokens in the log."""
    held = budget(spark(), spark().workers[0])
    assert held is not None
    assert held.kv_tokens == pytest.approx(86_720, rel=0.1)
