"""All findings in one table: when a finding holds, its fact, what it breaks, and the repair."""

import enum
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from baton.connect import Service
from operations.doctor.facts import BIG_MODEL_BYTES, GIB, INDEX, Facts, Gpu, Host, Model, Worker
from operations.doctor.memory import kv_bytes_given, shortage
from workers.engines.trtllm.settings import BACKEND, BUFFER, GUESSING, MANAGER_V2, RUNTIME, manager
from workers.engines.vllm.settings import GUESSING as VLLM_GUESSING


class Severity(enum.StrEnum):
    """Error: it will not run. Warning: it runs badly or not always."""

    ERROR = "error"
    WARNING = "warning"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem: the fact, what it breaks, and the command or edit that repairs it."""

    severity: Severity
    code: str
    fact: str
    breaks: str
    repair: str


E, W = Severity.ERROR, Severity.WARNING
_GRAPHS = "cuda_graph_config.max_batch_size"
# TensorRT-LLM runs gpt-oss on Hopper or newer.
_OLDEST_COMPUTE = (9, 0)
_PROCESSES = "nvidia-smi --id={it.index} --query-compute-apps=pid,name,used_memory --format=csv"
# The settings that prefill and decode must agree on, by code, with their defaults.
_SHARED_SETTINGS = {
    "pair-dtype": ("kv_cache_config.dtype", "auto"),
    "pair-block": ("kv_cache_config.tokens_per_block", "32"),
    "pair-backend": (BACKEND, ""),
    "pair-runtime": (RUNTIME, "auto"),
    "pair-manager": (MANAGER_V2, "auto"),
    "pair-head": (f"{GUESSING.names[0]}.{GUESSING.model}", "none"),
    "pair-draft": (f"{VLLM_GUESSING.names[0]}.{VLLM_GUESSING.model}", "none"),
}
_ENTRY = re.compile(r"\d+|GPU-[0-9a-fA-F-]+|MIG-[0-9a-fA-F/-]+")
_LOOPBACK = ("127.", "localhost", "::1")


class Row(NamedTuple):
    """A finding for each subject of `each` for which `when` returns something true.

    The texts are formats of `f` (the facts), `it` (the subject) and `found` (what `when` returned).
    """

    severity: Severity
    code: str
    each: Callable[[Facts], Iterable[Any]]
    when: Callable[[Facts, Any], object]
    fact: str
    breaks: str
    repair: str


def _here(facts: Facts) -> Iterable[Facts]:
    return (facts,)


_workers: Callable[[Facts], Iterable[Worker]] = operator.attrgetter("workers")
_services: Callable[[Facts], Iterable[Service]] = operator.attrgetter("services")


def _both(facts: Facts) -> Iterable[tuple[Worker, Worker]]:
    prefill, decode = facts.worker("prefill"), facts.worker("decode")
    return [(prefill, decode)] if prefill and decode else ()


def _transceivers(facts: Facts) -> Iterable[Worker]:
    is_demo = 0 < facts.model.weight_bytes <= BIG_MODEL_BYTES  # which the embedded engine runs
    if facts.engine != "trtllm" or not facts.wants_gpus or is_demo:
        return []
    found = (facts.worker("prefill"), facts.worker("decode"))
    return [worker for worker in found if worker and worker.given]


def _folders(facts: Facts) -> Iterable[Model]:
    return (facts.model,) if facts.model.is_folder else ()


def _taken_gib(gpu: Gpu) -> float | None:
    if gpu.free_bytes is None or gpu.total_bytes is None:
        return None
    taken = (gpu.total_bytes - gpu.free_bytes) / GIB
    return taken if taken > 2 else None


def _bad_list(facts: Facts, worker: Worker) -> str | None:
    """The list of GPUs, if CUDA cannot parse it or finds a GPU twice in it."""
    found = [(entry, facts.gpu(entry)) for entry in worker.gpu_list]
    is_unique = len({entry if gpu is None else gpu.index for entry, gpu in found}) == len(found)
    return None if is_unique and all(_ENTRY.fullmatch(entry) for entry, _ in found) else repr(worker.gpus)


def _absent(facts: Facts, worker: Worker) -> str | None:
    if not facts.nvidia.gpus or _bad_list(facts, worker):
        return None
    wanted = [entry for entry in worker.gpu_list if not entry.startswith("MIG-")]
    return ", ".join(entry for entry in wanted if facts.gpu(entry) is None)


def _shared_gpus(facts: Facts, worker: Worker) -> str | None:
    """The GPUs that a later worker uses as well, unless both have a KV cache of a given size."""
    if not facts.wants_gpus:
        return None
    later = facts.workers[facts.workers.index(worker) + 1 :]
    later = tuple(w for w in later if not (kv_bytes_given(worker) and kv_bytes_given(w)))
    used = {gpu.index for other in later for gpu in facts.gpus_of(other)}
    return ", ".join(str(gpu.index) for gpu in facts.gpus_of(worker) if gpu.index in used)


def _missing_files(facts: Facts) -> Iterator[tuple[str, str]]:
    for found in _folders(facts):
        if "config.json" not in found.files:
            yield "config.json", "no engine can build the model"
        if "tokenizer.json" not in found.files:
            yield "tokenizer.json", "the frontend cannot turn text into tokens"
        if not found.shards and INDEX not in found.bad_files:
            yield "*.safetensors", "no weights to load"
        if len(found.shards) > 1 and INDEX not in found.files:
            yield INDEX, "the engine cannot tell which file holds which weight"
        if missing := [shard.name for shard in found.shards if shard.size_bytes is None]:
            yield _some(missing), "the engine exits after minutes of loading"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _larger(first: float | None, second: float | None) -> tuple[int, int] | None:
    """Both, if the first is the larger one."""
    return None if first is None or second is None or first <= second else (int(first), int(second))


def _shared(code: str) -> Row:
    """The finding that prefill and decode have different values of a setting, if both are known."""
    key, default = _SHARED_SETTINGS[code]

    def word(worker: Worker) -> str:
        if key == MANAGER_V2:
            return manager(worker.text(RUNTIME, "auto"), worker.given.get(key, "auto"))
        return worker.text(key, default).lower()

    def differ(_: Facts, pair: tuple[Worker, Worker]) -> tuple[str, str] | None:
        prefill, decode = map(word, pair)
        is_known = prefill and decode and all(worker.given for worker in pair)
        return (prefill, decode) if is_known and prefill != decode else None

    return Row(
        E, code, _both, differ,
        f"{key}: {{found[0]}} on prefill, {{found[1]}} on decode",
        "the pair is refused: neither can read the other's KV blocks",
        f"set the same {key} in both files",
    )  # fmt: skip


def _is_down(facts: Facts, service: Service, *, alone: bool) -> bool:
    """Whether a server does not answer, nor (`alone`) any other member of its cluster."""
    answering = {each.name for each in facts.services if not each.problem}
    return bool(service.problem) and not service.is_refusal and (service.name not in answering) == alone


def _far_from_loopback(facts: Facts) -> str | None:
    """A service on another machine, if workers announce a loopback address."""
    remote = [s.url for s in facts.services if not (urlsplit(s.url).hostname or "").startswith(_LOOPBACK)]
    return next(iter(remote), None) if facts.bind_host.startswith(_LOOPBACK) else None


def _without_cuda_ipc(host: Host) -> str | None:
    """UCX's transports, if cuda_ipc is not among them; after a `^` they are the forbidden ones."""
    transports = host.environment.get("UCX_TLS", "all")
    names = set(transports.removeprefix("^").split(","))
    is_named = bool(names & {"cuda", "cuda_ipc"})
    is_without = is_named if transports.startswith("^") else not (is_named or "all" in names)
    return transports if is_without else None


TABLE = (
    # GPUs
    Row(E, "gpu-none", _here, lambda f, _: f.wants_gpus and f.nvidia.why_none,
        "no NVIDIA GPU: {found}",
        "the engine exits at start; on the CPU, only the demo model runs",
        "nvidia-smi (in a container: docker run --gpus all ...; else install the driver)"),
    Row(E, "gpu-old", Facts.used_gpus, lambda _, it: it.compute < _OLDEST_COMPUTE,
        "GPU {it.index} is a {it.name}, compute capability {it.compute[0]}.{it.compute[1]}",
        "TensorRT-LLM has no MXFP4 kernels for gpt-oss before Hopper (9.0)",
        "use a Hopper or Blackwell GPU, or --engine embedded with the demo model"),
    Row(W, "gpu-busy", Facts.used_gpus, lambda _, it: _taken_gib(it),
        "{found:.1f} GiB of GPU {it.index} are in use",
        "less memory for the KV cache, and out of memory when the other process grows", _PROCESSES),
    Row(E, "gpu-list", _workers, _bad_list,
        "{it.mode}: CUDA_VISIBLE_DEVICES={found} is not a list of different indices or UUIDs",
        "CUDA stops at an entry that it cannot parse, and rejects a list with a GPU twice",
        "list each index once, without ranges and spaces: 0,1,2,3 (nvidia-smi --list-gpus)"),
    Row(E, "gpu-absent", _workers, _absent,
        "{it.mode}: no GPU {found} (listed: {it.gpus}; have {f.gpu_indices})",
        "CUDA hides it and every GPU after it in the list",
        "nvidia-smi --list-gpus; in a container: docker run --gpus all"),
    Row(E, "gpu-shared", _workers, _shared_gpus,
        "{it.mode} and another worker both use GPU {found}",
        "the second worker to load finds too little memory, or both run out later",
        "give each its own: --prefill-gpus 0,1,2,3 --decode-gpus 4,5,6,7; or, on vLLM, "
        "launch/gpt_oss_vllm.sh --one-gpu"),
    # The model folder
    Row(E, "model-unreadable", _here, lambda f, _: f.model.folder_problem,
        "{f.model.path}: {found}", "workers exit at start",
        "ls -ld {f.model.path}; chmod -R a+rX {f.model.path}, or run as its owner"),
    Row(E, "model-absent", _here, lambda f, _: not f.model.is_folder and not f.model.folder_problem,
        "{f.model.path} is not a folder, nor a model in the hub's cache",
        "workers exit at start; nothing is downloaded automatically", "{f.model.download}"),
    Row(E, "file-missing", _missing_files, lambda *_: True,
        "{f.model.path} has no {it[0]}", "{it[1]}", "{f.model.download}"),
    Row(E, "file-bad", lambda f: [bad for it in _folders(f) for bad in it.bad_files.items()], lambda *_: True,
        "{f.model.path}/{it[0]}: {it[1]}", "the frontend or the engine exits at start", "{f.model.download}"),
    Row(E, "model-other", _folders, lambda _, it: it.shape and it.shape.model_type != "gpt_oss",
        "{it.path}/config.json: model_type is {it.shape.model_type}",
        "Baton uses Harmony, the format of gpt-oss: answers of other models make no sense", "{it.download}"),
    Row(E, "shard-broken", _folders,
        lambda _, it: _some([s.name for s in it.shards if s.size_bytes not in (None, s.whole_bytes)]),
        "truncated weight files or git-lfs pointers: {found}",
        "loading fails with a header or deserialization error",
        "remove them from {it.path}, then {it.download}"),
    # Memory of each worker's GPUs
    Row(E, "memory-short", _workers, shortage,
        "{it.mode}: {found}", "CUDA out of memory while loading",
        "stop what is on that GPU (nvidia-smi), more GPUs for this worker, or gpt-oss-20b"),
    # Each worker's settings
    Row(E, "settings-refused", _workers, lambda _, it: it.refusal,
        "{it.mode}: {found}",
        "the {it.mode} worker exits at start with this error",
        "change or remove the named setting; engine_configs/README.md lists the keys"),
    Row(W, "batch-graphs", _workers, lambda _, it: _larger(it.number("max_batch_size"), it.number(_GRAPHS)),
        "{it.mode}: max_batch_size {found[0]}, CUDA graphs up to {found[1]}",
        "larger batches run without graphs: tokens take longer exactly under full load",
        f"{_GRAPHS}: {{found[0]}}, or max_batch_size: {{found[1]}}"),
    # Prefill and decode together
    Row(W, "buffer-unset", _transceivers, lambda _, it: it.number(BUFFER) is None,
        f"{{it.mode}}: {BUFFER} is not set",
        "transfers of long prompts go through a small default buffer: slow, or they stall",
        f"{BUFFER}: as large as the longest prompt"),
    Row(E, "buffer-short", _transceivers,
        lambda f, it: _larger(it.number("max_seq_len") or f.context, it.number(BUFFER)),
        f"{{it.mode}}: {BUFFER} {{found[1]:,}} is below the longest prompt, {{found[0]:,}}",
        "a longer prompt stalls prefill and decode forever (Dynamo #4327)",
        f"{BUFFER}: {{found[0]}}, or max_seq_len: {{found[1]}} in both files"),
    *map(_shared, _SHARED_SETTINGS),
    Row(E, "pair-length", _both, lambda _, it: _larger(*(worker.number("max_seq_len") for worker in it)),
        "max_seq_len: {found[0]:,} on prefill, {found[1]:,} on decode",
        "decode refuses requests that prefill has already processed",
        "max_seq_len: {found[0]} in decode's file"),
    # etcd and NATS
    Row(E, "server-down", _services, lambda f, it: _is_down(f, it, alone=True),
        "{it.name} at {it.url}: {it.problem}", "workers cannot register, or requests cannot reach them",
        "docker compose -f deploy/docker-compose.yml up -d, or set ETCD_ENDPOINTS or NATS_SERVER"),
    Row(W, "member-down", _services, lambda f, it: _is_down(f, it, alone=False),
        "{it.name} at {it.url}: {it.problem}", "nothing while the other members are a majority",
        "restart it, or remove it from ETCD_ENDPOINTS or NATS_SERVER"),
    Row(E, "login", _services, lambda _, it: it.is_refusal,
        "{it.name} at {it.url} denies access: {it.problem}", "frontend and workers exit at start",
        "ETCD_AUTH_... or NATS_AUTH_... of a user, a token or a key: deploy/README.md, Security"),
    # The machine or container
    Row(E, "start", _here, lambda f, _: f.start_problem,
        "{found}", "frontend and workers exit at start with this error", "deploy/README.md, Security"),
    Row(E, "port-taken", _here, lambda f, _: f.http_port_problem,
        "port {f.http_port}: {found}",
        "the frontend exits at start, or another program answers in its place",
        "ss -ltnp 'sport = :{f.http_port}'; stop it, or choose another --http-port"),
    Row(W, "host-loopback", _here, lambda f, _: _far_from_loopback(f),
        "--host {f.bind_host}, but {found} is on another machine",
        "workers advertise an address that other nodes cannot reach",
        "--host (or BATON_HOST) with this machine's address: ip -brief address"),
    Row(W, "memlock", _here, lambda f, _: f.wants_gpus and f.host.memlock_bytes is not None,
        "locked memory is limited to {f.host.memlock_bytes} bytes",
        "UCX cannot register memory with the network card: KV goes over TCP",
        "docker run --ulimit memlock=-1; outside: ulimit -l unlimited (limits.conf)"),
    Row(E, "shm", _here, lambda f, _: f.host.shm_bytes < GIB and f.wants_gpus
        and any(worker.tensor_parallel_size > 1 for worker in f.workers),
        "shared memory (/dev/shm) is {f.host.shm_bytes} bytes",
        "NCCL and MPI ranks communicate through it: bus errors at start",
        "docker run --ipc host (or --shm-size=10G)"),
    # Inherited variables
    Row(W, "ucx-tls", _here, lambda f, _: f.wants_gpus and _without_cuda_ipc(f.host),
        "UCX_TLS={found} excludes cuda_ipc",
        "KV moves through host memory and TCP instead of NVLink: 10 to 100 times slower",
        "unset UCX_TLS, or add cuda_copy,cuda_ipc"),
)  # fmt: skip


def findings(facts: Facts) -> Iterable[Finding]:
    """All findings about these facts, in the table's order; pure."""
    for row in TABLE:
        for it in row.each(facts):
            if found := row.when(facts, it):
                fact, breaks, repair = (
                    text.format(f=facts, it=it, found=found) for text in (row.fact, row.breaks, row.repair)
                )
                yield Finding(severity=row.severity, code=row.code, fact=fact, breaks=breaks, repair=repair)
