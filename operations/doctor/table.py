"""All findings in one table: when a finding holds, its fact, what it breaks, and the repair."""

import operator
from collections.abc import Callable, Iterable
from typing import Any, Final, Literal, NamedTuple

import msgspec

from operations.doctor.facts import GIB, Facts, Gpu, Worker
from operations.doctor.memory import KV_BYTES, shortage
from workers.engines.trtllm.settings import BACKEND, BUFFER

Severity = Literal["error", "warning"]
"""Error: it will not run. Warning: it runs badly or not always."""


class Finding(msgspec.Struct, frozen=True):
    """One problem: the fact, what it breaks, and the command or edit that repairs it."""

    severity: Severity
    code: str
    fact: str
    breaks: str
    repair: str


E: Final = "error"
W: Final = "warning"
_GRAPHS, _BATCH = "cuda_graph_config.max_batch_size", "{it.given[max_batch_size]}"
_PROCESSES = "nvidia-smi --id={it.index} --query-compute-apps=pid,name,used_memory --format=csv"


class Row(NamedTuple):
    """A finding for each subject of `each` for which `when` returns something true.

    The texts are formats of `f` (the facts), `it` (the subject) and `found` (what `when` returned)."""

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


def _taken_gib(_: Facts, gpu: Gpu) -> float | None:
    taken = 0 if gpu.is_unified else (gpu.total_bytes - gpu.free_bytes) / GIB
    return taken if taken > 2 else None


def _wrong_entries(facts: Facts, worker: Worker) -> str:
    """The entries of its list of GPUs that are not there, or there twice."""
    seen: set[object] = set()
    wrong = []
    for entry in worker.gpu_list if facts.gpus else ():
        gpu = facts.gpu(entry)
        place = entry if gpu is None else gpu.index
        if place in seen or (gpu is None and not entry.startswith("MIG-")):
            wrong.append(entry)
        seen.add(place)
    return ", ".join(map(repr, wrong))


def _shared_gpus(facts: Facts, worker: Worker) -> str | None:
    """The GPUs that a later worker uses as well, unless both have a KV cache of a given size."""
    if not facts.wants_gpus:
        return None
    later = facts.workers[facts.workers.index(worker) + 1 :]
    later = tuple(w for w in later if not (worker.number(KV_BYTES) and w.number(KV_BYTES)))
    used = {gpu.index for other in later for gpu in facts.gpus_of(other)}
    return ", ".join(str(gpu.index) for gpu in facts.gpus_of(worker) if gpu.index in used)


TABLE = (
    Row(E, "gpu-none", _here, lambda f, _: f.wants_gpus and f.gpu_problem,
        "no NVIDIA GPU: {found}",
        "the engine exits at start; on the CPU, only the demo model runs",
        "nvidia-smi (in a container: docker run --gpus all ...; else install the driver)"),
    Row(W, "gpu-busy", Facts.used_gpus, _taken_gib,
        "{found:.1f} GiB of GPU {it.index} are in use",
        "less memory for the KV cache, and out of memory when the other process grows", _PROCESSES),
    Row(E, "gpu-list", _workers, _wrong_entries,
        "{it.mode}: CUDA_VISIBLE_DEVICES={it.gpus}: no GPU {found}, or twice (have {f.gpu_indices})",
        "CUDA hides it and every GPU after it in the list",
        "list each index once, without ranges and spaces: 0,1,2,3 (nvidia-smi --list-gpus)"),
    Row(E, "gpu-shared", _workers, _shared_gpus,
        "{it.mode} and another worker both use GPU {found}",
        "the second worker to load finds too little memory, or both run out later",
        "give each its own: --prefill-gpus 0,1,2,3 --decode-gpus 4,5,6,7; or, on vLLM, "
        "launch/gpt_oss_vllm.sh --one-gpu"),
    Row(E, "model-absent", _here, lambda f, _: f.model.problem,
        "{f.model.path}: {found}",
        "workers exit at start; nothing is downloaded automatically", "{f.model.download}"),
    Row(E, "file-missing", _here, lambda f, _: ", ".join(f.model.missing[:3]),
        "{f.model.path} has no {found}", "the frontend or the engine exits, after minutes of loading",
        "{f.model.download}"),
    Row(E, "model-other", _here, lambda f, _: f.model.model_type != "gpt_oss",
        "{f.model.path}/config.json: model_type is {f.model.model_type}",
        "Baton uses Harmony, the format of gpt-oss: answers of other models make no sense",
        "{f.model.download}"),
    Row(E, "memory-short", _workers, shortage,
        "{it.mode}: {found}", "CUDA out of memory while loading",
        "stop what is on that GPU (nvidia-smi), more GPUs for this worker, or gpt-oss-20b"),
    Row(E, "settings-refused", _workers, lambda _, it: it.refusal,
        "{it.mode}: {found}",
        "the {it.mode} worker exits at start with this error",
        "change or remove the named setting; engine_configs/README.md lists the keys"),
    Row(W, "batch-graphs", _workers, lambda _, it: 0 < it.number(_GRAPHS) < it.number("max_batch_size"),
        f"{{it.mode}}: max_batch_size {_BATCH}, CUDA graphs up to {{it.given[{_GRAPHS}]}}",
        "larger batches run without graphs: tokens take longer exactly under full load",
        f"{_GRAPHS}: {_BATCH}, or max_batch_size: {{it.given[{_GRAPHS}]}}"),
    Row(W, "buffer-unset", _workers,
        lambda f, it: f.engine == "trtllm" and BACKEND in it.given and not it.number(BUFFER),
        f"{{it.mode}}: {BUFFER} is not set",
        "transfers of long prompts go through a small default buffer: slow, or they stall",
        f"{BUFFER}: as large as the longest prompt"),
    Row(E, "port-taken", _here, lambda f, _: f.port_problem,
        "port {f.http_port}: {found}",
        "the frontend exits at start, or another program answers in its place",
        "ss -ltnp 'sport = :{f.http_port}'; stop it, or choose another --http-port"),
    Row(E, "server", lambda f: f.servers, lambda *_: True,
        "{it}", "workers exit, after 60 s if it does not answer; no request is served",
        "start it, or correct its address, ETCD_AUTH_... or NATS_AUTH_... (deploy/README.md)"),
    Row(W, "memlock", _here, lambda f, _: f.wants_gpus and f.memlock_bytes is not None,
        "locked memory is limited to {f.memlock_bytes} bytes",
        "UCX cannot register memory with the network card: KV goes over TCP",
        "docker run --ulimit memlock=-1; outside: ulimit -l unlimited (limits.conf)"),
    Row(E, "shm", _here, lambda f, _: f.shm_bytes < GIB and f.wants_gpus
        and any(worker.tensor_parallel_size > 1 for worker in f.workers),
        "shared memory (/dev/shm) is {f.shm_bytes} bytes",
        "NCCL and MPI ranks communicate through it: bus errors at start",
        "docker run --ipc host (or --shm-size=10G)"),
)  # fmt: skip


def findings(facts: Facts) -> list[Finding]:
    """What is wrong with these facts, worst first, nothing twice; pure."""
    all_found: dict[Finding, None] = {}
    for row in TABLE:
        for it in row.each(facts):
            if found := row.when(facts, it):
                texts = (text.format(f=facts, it=it, found=found) for text in row[-3:])
                all_found[Finding(row.severity, row.code, *texts)] = None
    return sorted(all_found, key=lambda finding: finding.severity)
