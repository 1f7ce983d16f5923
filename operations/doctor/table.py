"""All findings in one table: when a finding holds, its fact, what it breaks, and the repair."""

import enum
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from baton.connect import Service
from operations.doctor import conditions as c
from operations.doctor.facts import GIB, Facts, Worker
from operations.doctor.memory import shortage
from workers.engines.trtllm.settings import BUFFER


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


def _shared(code: str) -> Row:
    key, _ = c.SHARED_SETTINGS[code]
    return Row(
        E, code, c.both, lambda _, it: c.differ(it, code),
        f"{key}: {{found[0]}} on prefill, {{found[1]}} on decode",
        "the pair is refused: neither can read the other's KV blocks",
        f"set the same {key} in both files",
    )  # fmt: skip


TABLE = (
    # GPUs and driver
    Row(E, "gpu-none", _here, lambda f, _: f.wants_gpus and c.no_gpu(f),
        "no NVIDIA GPU: {found}",
        "the engine exits at start; on the CPU, only the demo model runs",
        "nvidia-smi (in a container: docker run --gpus all ...; else install the driver)"),
    Row(E, "driver-old", c.old_drivers, lambda *_: True,
        "NVIDIA driver {it[0]} is too old: {it[1]} or newer is required",
        "CUDA 12.8 does not start (CUDA driver version is insufficient)",
        "apt-get install nvidia-driver-580-server-open && reboot, or newer"),
    Row(E, "gpu-old", Facts.used_gpus, lambda _, it: it.compute < _OLDEST_COMPUTE,
        "GPU {it.index} is a {it.name}, compute capability {it.compute[0]}.{it.compute[1]}",
        "TensorRT-LLM has no MXFP4 kernels for gpt-oss before Hopper (9.0)",
        "use a Hopper or Blackwell GPU, or --engine embedded with the demo model"),
    Row(W, "gpu-busy", Facts.used_gpus, lambda _, it: c.taken_gib(it),
        "{found:.1f} GiB of GPU {it.index} are in use",
        "less memory for the KV cache, and out of memory when the other process grows", _PROCESSES),
    Row(E, "gpu-list", _workers, c.bad_list,
        "{it.mode}: CUDA_VISIBLE_DEVICES={found} is not a list of different indices or UUIDs",
        "CUDA stops at an entry that it cannot parse, and rejects a list with a GPU twice",
        "list each index once, without ranges and spaces: 0,1,2,3 (nvidia-smi --list-gpus)"),
    Row(E, "gpu-absent", _workers, c.absent,
        "{it.mode}: no GPU {found} (listed: {it.gpus}; have {f.gpu_indices})",
        "CUDA hides it and every GPU after it in the list",
        "nvidia-smi --list-gpus; in a container: docker run --gpus all"),
    Row(E, "gpu-shared", _workers, c.shared_gpus,
        "{it.mode} and another worker both use GPU {found}",
        "the second worker to load finds too little memory, or both run out later",
        "give each its own: --prefill-gpus 0,1,2,3 --decode-gpus 4,5,6,7; or, on vLLM, "
        "launch/gpt_oss_vllm.sh --one-gpu"),
    Row(E, "gpu-small", c.small_gpus, lambda *_: True,
        "prefill and decode on one GPU: {it}", "CUDA out of memory while the second one loads",
        "a GPU for each, a larger GPU, gpt-oss-20b, or one aggregated worker: --agg"),
    # The model folder
    Row(E, "model-unreadable", _here, lambda f, _: f.model.folder_problem,
        "{f.model.path}: {found}", "workers exit at start",
        "ls -ld {f.model.path}; chmod -R a+rX {f.model.path}, or run as its owner"),
    Row(E, "model-absent", _here, lambda f, _: not f.model.is_folder and not f.model.folder_problem,
        "{f.model.path} is not a folder, nor a model in the hub's cache",
        "workers exit at start; nothing is downloaded automatically", "{f.model.download}"),
    Row(E, "model-cache", _here, lambda f, _: c.is_cache(f.model),
        "{f.model.path} is a Hugging Face cache folder; the model is in a subfolder",
        "workers exit at start: no config.json", "--model-path {f.model.snapshot}"),
    Row(E, "file-missing", c.missing_files, lambda *_: True,
        "{f.model.path} has no {it[0]}", "{it[1]}", "{f.model.download}"),
    Row(E, "file-bad", c.bad_files, lambda *_: True,
        "{f.model.path}/{it[0]}: {it[1]}", "the frontend or the engine exits at start", "{f.model.download}"),
    Row(E, "model-other", c.folders, lambda _, it: it.shape and it.shape.model_type != "gpt_oss",
        "{it.path}/config.json: model_type is {it.shape.model_type}",
        "Baton uses Harmony, the format of gpt-oss: answers of other models make no sense", "{it.download}"),
    Row(E, "shard-broken", c.folders, lambda _, it: c.broken_shards(it),
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
    Row(W, "batch-graphs", _workers, c.beyond_graphs,
        "{it.mode}: max_batch_size {found[0]}, CUDA graphs up to {found[1]}",
        "larger batches run without graphs: tokens take longer exactly under full load",
        f"{_GRAPHS}: {{found[0]}}, or max_batch_size: {{found[1]}}"),
    # Prefill and decode together
    Row(W, "buffer-unset", c.transceivers, lambda _, it: it.number(BUFFER) is None,
        f"{{it.mode}}: {BUFFER} is not set",
        "transfers of long prompts go through a small default buffer: slow, or they stall",
        f"{BUFFER}: as large as the longest prompt"),
    Row(E, "buffer-short", c.transceivers, c.short_buffer,
        f"{{it.mode}}: {BUFFER} {{found[0]:,}} is below the longest prompt, {{found[1]:,}}",
        "a longer prompt stalls prefill and decode forever (Dynamo #4327)",
        f"{BUFFER}: {{found[1]}}, or max_seq_len: {{found[0]}} in both files"),
    *map(_shared, c.SHARED_SETTINGS),
    Row(E, "pair-length", c.both, lambda _, it: c.shorter_decode(it),
        "max_seq_len: {found[0]:,} on prefill, {found[1]:,} on decode",
        "decode refuses requests that prefill has already processed",
        "max_seq_len: {found[0]} in decode's file"),
    # etcd and NATS
    Row(E, "server-down", _services,
        lambda f, it: it.problem and not it.is_refusal and not c.has_other(f, it),
        "{it.name} at {it.url}: {it.problem}", "workers cannot register, or requests cannot reach them",
        "docker compose -f deploy/docker-compose.yml up -d, or set ETCD_ENDPOINTS or NATS_SERVER"),
    Row(W, "member-down", _services,
        lambda f, it: it.problem and not it.is_refusal and c.has_other(f, it),
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
    Row(W, "host-loopback", _here, lambda f, _: c.far_from_loopback(f),
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
    Row(W, "trtllm-missing", _here,
        lambda f, _: c.lacks_trtllm(f) and (f.host.in_container or not f.host.has_docker),
        "tensorrt_llm is not installed, nor can its image be run from here",
        "--engine trtllm exits at start",
        "the worker image, with Docker and the NVIDIA Container Toolkit: deploy/README.md"),
    Row(E, "toolkit-missing", _here,
        lambda f, _: c.lacks_trtllm(f) and f.host.has_docker
        and not (f.host.in_container or f.host.has_container_toolkit),
        "docker is installed, but the NVIDIA Container Toolkit is not",
        "docker run --gpus all: could not select device driver",
        "apt-get install nvidia-container-toolkit && nvidia-ctk runtime configure; restart docker"),
    # Inherited variables
    Row(W, "ucx-tls", _here, lambda f, _: f.wants_gpus and c.without_cuda_ipc(f.host),
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
