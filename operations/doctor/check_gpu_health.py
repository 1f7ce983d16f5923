"""Checks of GPU health as nvidia-smi reports it: memory errors, modes, NVSwitch; and of index order."""

from collections.abc import Iterator

from operations.doctor.check_gpus import used_gpus
from operations.doctor.facts import Facts, GpuHealth
from operations.doctor.findings import Finding, error, note, warning


def health(facts: Facts) -> Iterator[Finding]:
    """Is each GPU in use healthy, and do CUDA and nvidia-smi number GPUs alike?"""
    for gpu in used_gpus(facts):
        if gpu.health is not None:
            yield from _memory_errors(gpu.index, gpu.health)
            yield from _modes(gpu.index, gpu.health)
    off = [gpu.index for gpu in used_gpus(facts) if gpu.health and gpu.health.persistence_mode == "Disabled"]
    if off:
        yield note(
            "gpu-persistence", f"GPU {', '.join(map(str, off))}: persistence mode is off",
            breaks="the driver reinitialises an idle GPU for the next process: seconds lost, limits reset",
            repair="systemctl enable --now nvidia-persistenced, or nvidia-smi --persistence-mode=1",
        )  # fmt: skip
    names = {gpu.name for gpu in facts.nvidia.gpus}
    order = facts.host.environment.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    indexed = any(entry.isdecimal() for worker in facts.workers for entry in worker.gpu_list)
    if len(names) > 1 and indexed and order != "PCI_BUS_ID":
        yield warning(
            "gpu-order", f"{len(names)} GPU models, and CUDA_DEVICE_ORDER is {order}",
            breaks="CUDA numbers the fastest first, nvidia-smi by PCI slot: an index may select another GPU",
            repair="export CUDA_DEVICE_ORDER=PCI_BUS_ID, or list UUIDs (nvidia-smi --list-gpus)",
        )  # fmt: skip


def _memory_errors(index: int, state: GpuHealth) -> Iterator[Finding]:
    if state.remap_failure == "Yes":
        yield error(
            "gpu-broken", f"GPU {index}: a faulty memory row could not be remapped",
            breaks="wrong results or a crash (Xid 64)",
            repair="remove this GPU from the lists and have it replaced",
        )  # fmt: skip
    elif state.num_ecc_errors or state.remap_pending == "Yes":
        yield warning(
            "gpu-ecc", f"GPU {index}: {state.num_ecc_errors or 0} uncorrectable ECC errors, "
            f"row remapping pending: {state.remap_pending}",
            breaks="processes on it are killed (Xid 48, 94, 95)",
            repair=f"nvidia-smi --id={index} --gpu-reset (as root, GPU idle)",
        )  # fmt: skip


def _modes(index: int, state: GpuHealth) -> Iterator[Finding]:
    if state.fabric_state in ("Not Started", "In Progress"):
        yield error(
            "gpu-fabric", f"GPU {index}: NVSwitch fabric {state.fabric_state.lower()}",
            breaks="CUDA does not start: error 802, system not yet initialized",
            repair="systemctl enable --now nvidia-fabricmanager (same version as the driver)",
        )  # fmt: skip
    if state.compute_mode == "Prohibited":
        yield error(
            "gpu-prohibited", f"GPU {index}: compute mode Prohibited",
            breaks="no process may use it: the engine exits at start",
            repair=f"nvidia-smi --id={index} --compute-mode=DEFAULT",
        )  # fmt: skip
    elif state.compute_mode == "Exclusive_Process":
        yield warning(
            "gpu-exclusive", f"GPU {index}: compute mode Exclusive_Process",
            breaks="only one process may use it: a worker's parent process and its rank conflict",
            repair=f"nvidia-smi --id={index} --compute-mode=DEFAULT",
        )  # fmt: skip
