"""Checks of the GPUs: presence, assignment to workers, and the links between them."""

import itertools
import re
from collections.abc import Iterator

from operations.doctor.facts import GIB, Facts, Gpu, Worker
from operations.doctor.findings import Finding, error, note, warning

# TensorRT-LLM runs gpt-oss on Hopper or newer. CUDA 12.8 needs driver 570; its guide asks for 575 on
# Blackwell. The 1.3 images contain CUDA 13, which needs driver 580 or, on data centre GPUs only,
# compatibility libraries.
_OLDEST_COMPUTE = (9, 0)
_OLDEST_DRIVER = 570
_OLDEST_DRIVER_BLACKWELL = 575
_CUDA_13_DRIVER = 580
_FOREIGN_BYTES = 2 * GIB
_ENTRY = re.compile(r"\d+|GPU-[0-9a-fA-F-]+|MIG-[0-9a-fA-F/-]+")


def presence(facts: Facts) -> Iterator[Finding]:
    """Is there a GPU, new enough and free, with a recent enough driver?"""
    if not facts.nvidia.gpus:
        yield _no_gpu(facts)
    for driver in sorted({gpu.driver for gpu in facts.nvidia.gpus} if facts.wants_gpus else ()):
        yield from _driver(facts, driver)
    for gpu in used_gpus(facts):
        yield from _one_gpu(gpu)


def _driver(facts: Facts, driver: str) -> Iterator[Finding]:
    blackwell = any(gpu.compute >= (10, 0) for gpu in facts.nvidia.gpus)
    needed = _OLDEST_DRIVER_BLACKWELL if blackwell else _OLDEST_DRIVER
    major = driver.partition(".")[0]
    number = int(major) if major.isdecimal() else 0
    if number < needed:
        yield error(
            "driver-old", f"NVIDIA driver {driver} is too old: {needed} or newer is required",
            breaks="CUDA 12.8 does not start (CUDA driver version is insufficient)",
            repair=f"apt-get install nvidia-driver-{_CUDA_13_DRIVER}-server-open && reboot, or newer",
        )  # fmt: skip
    elif number < _CUDA_13_DRIVER:
        yield warning(
            "driver-cuda13", f"NVIDIA driver {driver}; CUDA 13 expects {_CUDA_13_DRIVER}",
            breaks="TensorRT-LLM 1.3's image starts on data centre GPUs only, with compatibility libraries",
            repair=f"apt-get install nvidia-driver-{_CUDA_13_DRIVER}-server-open && reboot, or newer",
        )  # fmt: skip


def used_gpus(facts: Facts) -> list[Gpu]:
    """The GPUs that the workers will see, without duplicates; empty if no GPU is wanted."""
    used = {gpu.index: gpu for worker in facts.workers for gpu in facts.gpus_of(worker)}
    return list(used.values()) if facts.wants_gpus else []


def _no_gpu(facts: Facts) -> Finding:
    why = facts.nvidia.problem or "nvidia-smi lists none"
    if facts.wants_gpus:
        return error(
            "gpu-none", f"no NVIDIA GPU: {why}",
            breaks="the engine exits at start; on the CPU, only the demo model runs",
            repair="nvidia-smi (in a container: docker run --gpus all ...; else install the driver)",
        )  # fmt: skip
    return note(
        "gpu-none", f"no NVIDIA GPU ({why}): checks of GPUs, driver and container limits are skipped",
        breaks="nothing: the demo model runs on the CPU; gpt-oss-20b and 120b need a GPU",
        repair="none needed: make up serves the demo model",
    )  # fmt: skip


def _one_gpu(gpu: Gpu) -> Iterator[Finding]:
    if gpu.compute < _OLDEST_COMPUTE:
        major, minor = gpu.compute
        yield error(
            "gpu-old", f"GPU {gpu.index} is a {gpu.name}, compute capability {major}.{minor}",
            breaks="TensorRT-LLM has no MXFP4 kernels for gpt-oss before Hopper (9.0)",
            repair="use a Hopper or Blackwell GPU, or --engine embedded with the demo model",
        )  # fmt: skip
    if gpu.free_bytes is None or gpu.total_bytes is None:
        return
    taken = gpu.total_bytes - gpu.free_bytes
    if taken > _FOREIGN_BYTES:
        yield warning(
            "gpu-busy", f"{taken / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB of GPU {gpu.index} are in use",
            breaks="less memory for the KV cache, and out of memory when the other process grows",
            repair=f"nvidia-smi --id={gpu.index} --query-compute-apps=pid,name,used_memory --format=csv",
        )  # fmt: skip


def lists(facts: Facts) -> Iterator[Finding]:
    """Does each worker's list parse, with enough GPUs that exist and that no other worker uses?"""
    for worker in facts.workers:
        yield from _one_list(facts, worker)
    if not facts.nvidia.gpus:
        return
    for one, other in itertools.combinations(facts.workers, 2):
        shared = {gpu.index for gpu in facts.gpus_of(one)} & {gpu.index for gpu in facts.gpus_of(other)}
        if shared and facts.wants_gpus:
            names = ", ".join(map(str, sorted(shared)))
            yield error(
                "gpu-shared", f"{one.mode} ({one.gpus or 'all GPUs'}) and {other.mode} "
                f"({other.gpus or 'all GPUs'}) both use GPU {names}",
                breaks="the second worker to load finds too little memory, or both run out later",
                repair="give each its own: --prefill-gpus 0,1,2,3 --decode-gpus 4,5,6,7",
            )  # fmt: skip


def _one_list(facts: Facts, worker: Worker) -> Iterator[Finding]:
    entries = worker.gpu_list
    bad = [entry for entry in entries if not _ENTRY.fullmatch(entry)]
    if bad:
        meant = "a range" if re.fullmatch(r"\d+-\d+", bad[0]) else "neither a GPU index nor a UUID"
        yield error(
            "gpu-list", f"{worker.mode}: CUDA_VISIBLE_DEVICES={worker.gpus}: {bad[0]!r} is {meant}",
            breaks="CUDA stops at the first entry that it cannot parse: GPUs are missing",
            repair=f"list each index, without spaces: {_spelt_out(worker.gpus or '')}",
        )  # fmt: skip
        return
    if len({_identity(facts, entry) for entry in entries}) < len(entries):
        yield error(
            "gpu-twice", f"{worker.mode}: CUDA_VISIBLE_DEVICES={worker.gpus} lists a GPU twice",
            breaks="CUDA rejects the whole list: no GPU is visible",
            repair="list each GPU once, by index or by UUID: nvidia-smi --list-gpus",
        )  # fmt: skip
        return
    absent = [entry for entry in entries if not entry.startswith("MIG-") and facts.gpu(entry) is None]
    if facts.nvidia.gpus and absent:
        have = ",".join(str(gpu.index) for gpu in facts.nvidia.gpus)
        yield error(
            "gpu-absent", f"{worker.mode}: no GPU {', '.join(absent)} (listed: {worker.gpus}; have {have})",
            breaks="CUDA hides it and every GPU after it in the list",
            repair="nvidia-smi --list-gpus; in a container: docker run --gpus all",
        )  # fmt: skip
        return
    yield from _count(facts, worker)


def _identity(facts: Facts, entry: str) -> object:
    gpu = facts.gpu(entry)
    return entry if gpu is None else gpu.index


def _spelt_out(text: str) -> str:
    span = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", text)
    if span and int(span[2]) - int(span[1]) < 64:
        return ",".join(map(str, range(int(span[1]), int(span[2]) + 1)))
    return ",".join(part.strip() for part in text.split(",")) if "," in text else "0,1,2,3"


def _count(facts: Facts, worker: Worker) -> Iterator[Finding]:
    if not facts.nvidia.gpus or not facts.wants_gpus:
        return
    num_have = len(worker.gpu_list) or len(facts.nvidia.gpus)
    num_need = worker.tensor_parallel_size * worker.pipeline_parallel_size
    if num_have < num_need:
        yield error(
            "gpu-too-few", f"{worker.mode}: {num_have} GPUs for TP x PP = {num_need}",
            breaks=f"TensorRT-LLM exits at start: only {num_have} GPUs are available",
            repair=f"list {num_need} GPUs, or set tensor_parallel_size: {num_have}",
        )  # fmt: skip
    elif worker.gpus is not None and num_have > num_need:
        yield warning(
            "gpu-idle", f"{worker.mode}: {num_have} GPUs are listed, TP x PP = {num_need} uses {num_need}",
            breaks=f"{num_have - num_need} GPUs stay idle",
            repair=f"list {num_need} GPUs, or set tensor_parallel_size: {num_have}",
        )  # fmt: skip


def fabric(facts: Facts) -> Iterator[Finding]:
    """Are a worker's GPUs alike and well connected, also between prefill and decode?"""
    for worker in facts.workers:
        gpus = facts.gpus_of(worker)[: worker.tensor_parallel_size]
        kinds = sorted({gpu.name for gpu in gpus})
        if len(kinds) > 1:
            yield warning(
                "gpu-mixed", f"{worker.mode}: different GPU models: {', '.join(kinds)}",
                breaks="the slowest GPU limits the speed of all, the smallest one their KV cache",
                repair="list GPUs of one model: nvidia-smi --list-gpus",
            )  # fmt: skip
        yield from _mig(worker, gpus)
        if len(gpus) > 1:
            yield from _pairs(facts, worker.mode, list(itertools.combinations(gpus, 2)), tensor_parallel=True)
    prefill, decode = facts.worker("prefill"), facts.worker("decode")
    if prefill and decode and facts.wants_gpus:
        pairs = [(a, b) for a in facts.gpus_of(prefill) for b in facts.gpus_of(decode) if a.index != b.index]
        yield from _pairs(facts, "prefill to decode", pairs, tensor_parallel=False)


def _mig(worker: Worker, gpus: list[Gpu]) -> Iterator[Finding]:
    parts = [entry for entry in worker.gpu_list if entry.startswith("MIG-")]
    split = [f"GPU {gpu.index}" for gpu in gpus if gpu.mig] + parts
    if split and worker.tensor_parallel_size > 1:
        yield error(
            "gpu-mig", f"{worker.mode}: {split[0]} uses MIG",
            breaks="no peer access between GPUs in MIG mode: tensor parallelism does not start",
            repair="nvidia-smi --multi-instance-gpu=0 (as root, GPUs idle)",
        )  # fmt: skip
    elif split and (worker.mode != "agg" or not parts):
        yield warning(
            "gpu-mig-part", f"{worker.mode}: {split[0]} uses MIG",
            breaks="an index selects the first MIG instance only, and KV cannot move over CUDA IPC",
            repair="nvidia-smi --multi-instance-gpu=0 (as root, GPU idle); or list the instance: MIG-...",
        )  # fmt: skip


def _pairs(
    facts: Facts, what: str, pairs: list[tuple[Gpu, Gpu]], *, tensor_parallel: bool
) -> Iterator[Finding]:
    """At most one finding, as eight GPUs have 28 pairs: missing peer access, else missing NVLink."""
    breaks = (
        "all-reduce runs over PCIe: several times slower"
        if tensor_parallel
        else "KV moves over PCIe or host memory: a longer time to first token"
    )
    without_nvlink = None
    for a, b in pairs:
        key = (a.index, b.index)
        peer, link = facts.nvidia.peers.get(key, "OK"), facts.nvidia.links.get(key, "NV")
        if peer != "OK":
            yield warning(
                "gpu-no-peer", f"{what}: GPU {a.index} cannot read GPU {b.index}'s memory ({peer})",
                breaks=breaks,
                repair="nvidia-smi topo -p2p r; turn IOMMU/ACS off in the BIOS, or use other GPUs",
            )  # fmt: skip
            return
        if not link.startswith("NV") and without_nvlink is None:
            without_nvlink = f"{what}: no NVLink between GPU {a.index} and GPU {b.index} ({link})"
    if without_nvlink:
        yield warning(
            "gpu-no-nvlink", without_nvlink,
            breaks=breaks,
            repair="nvidia-smi topo -m; choose GPUs joined by NV#",
        )  # fmt: skip
