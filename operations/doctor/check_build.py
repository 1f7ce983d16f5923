"""Checks of settings that are wrong, or have known issues, in some builds of TensorRT-LLM only."""

import re
from collections.abc import Callable, Iterator

import msgspec

from operations.doctor.facts import Facts, Worker
from operations.doctor.findings import Finding, Severity
from workers.engines.trtllm.settings import MANAGER_V2, RUNTIME

_MOE = "moe_config.backend"
_REUSE = "kv_cache_config.enable_block_reuse"
_HOPPER, _B200 = 9, 10  # compute capability
_FINAL = 1 << 30  # sorts after every release candidate

Build = tuple[int, ...]


class KnownIssue(msgspec.Struct, frozen=True, kw_only=True):
    """A setting's issue in the builds from `since` on and before `before`; both None: in all builds.

    `if_unknown`: also if TensorRT-LLM is not installed here. `{worker}` in the texts is the worker.
    """

    code: str
    severity: Severity
    since: str | None = None
    before: str | None = None
    if_unknown: bool = False
    concerns: Callable[[Facts, Worker], bool]
    fact: str
    breaks: str
    repair: str


def _experts(word: str, *computes: int) -> Callable[[Facts, Worker], bool]:
    """Whether a worker asks for these experts; with `computes`, on a GPU of such a compute capability."""

    def concerns(facts: Facts, worker: Worker) -> bool:
        is_asked = worker.text(_MOE, "AUTO").upper() == word
        gpus = facts.gpus_of(worker)
        return is_asked and (not computes or (bool(gpus) and gpus[0].compute[0] in computes))

    return concerns


def _runs(runtime: str) -> Callable[[Facts, Worker], bool]:
    return lambda _, worker: worker.mode != "agg" and worker.text(RUNTIME, "") == runtime


KNOWN = (
    KnownIssue(
        code="reuse-prefill", severity=Severity.WARNING, before="1.3.0rc11",
        concerns=lambda _, worker: worker.mode == "prefill" and worker.value(_REUSE) is not False,
        fact="{worker.mode}: blocks are reused",
        breaks="a reused block can be evicted before it is sent: the request hangs (TensorRT-LLM #12542)",
        repair=f"{_REUSE}: false on both sides, or a build from 1.3.0rc11 on",
    ),
    KnownIssue(
        code="accuracy", severity=Severity.WARNING, since="1.3.0rc24",
        concerns=lambda _, worker: worker.tensor_parallel_size > 1,
        fact="{worker.mode}: tensor_parallel_size {worker.tensor_parallel_size} and low-precision experts: "
        "a known issue since 1.3.0rc24",
        breaks="answers may be much less accurate; no release notes read so far say that it is fixed",
        repair="compare an evaluation with published scores before use: docs/from-the-guides.md",
    ),
    KnownIssue(
        code="cpp-deprecated", severity=Severity.NOTE, since="1.4.0rc0", concerns=_runs("CPP"),
        fact="{worker.mode}: the C++ transceiver is deprecated (#18248)",
        breaks="nothing yet: a later release refuses it",
        repair="engine_configs/gpt-oss-*/*_nixl.yaml on both sides",
    ),
    KnownIssue(
        code="nixl-crash", severity=Severity.NOTE, since="1.3.0rc24", concerns=_runs("PYTHON"),
        fact="{worker.mode}: KV over NIXL with UCX 1.21 has a known issue since 1.3.0rc24",
        breaks="the worker may crash with many transfers at a time; its requests go on elsewhere",
        repair="UCX 1.20, or the files with backend: UCX",
    ),
    KnownIssue(
        code="nixl-cancel", severity=Severity.NOTE, since="1.4.0rc1", concerns=_runs("PYTHON"),
        fact="{worker.mode}: KV over NIXL has a known issue since 1.4.0rc1",
        breaks="after cancelled streams a transfer may fail, and its prompt is computed again "
        "(Baton aborts no request during its transfer)",
        repair="none needed; the files with backend: UCX if it happens often",
    ),
    KnownIssue(
        code="manager-memory", severity=Severity.NOTE, since="1.3.0rc26",
        concerns=lambda _, worker: worker.mode == "agg" and worker.value(MANAGER_V2) is not False,
        fact="{worker.mode}: KV cache manager V2 asks for too much memory: a known issue of 1.3.0rc26",
        breaks="the engine may exit at start for lack of memory that is there",
        repair=f"if it does: {MANAGER_V2}: false",
    ),
    KnownIssue(
        code="moe-hopper", severity=Severity.ERROR, if_unknown=True, concerns=_experts("TRTLLM", _HOPPER),
        fact=f"{{worker.mode}}: {_MOE}: TRTLLM on a Hopper GPU",
        breaks="these kernels exist for Blackwell only: the engine exits at start",
        repair=f"{_MOE}: AUTO",
    ),
    KnownIssue(
        code="moe-hopper", severity=Severity.WARNING, before="1.4.0rc0", if_unknown=True,
        concerns=_experts("CUTLASS", _HOPPER),
        fact=f"{{worker.mode}}: {_MOE}: CUTLASS on a Hopper GPU",
        breaks="MXFP4 experts run slowly or not at all: these builds have Triton kernels for Hopper",
        repair=f"{_MOE}: AUTO",
    ),
    KnownIssue(
        code="moe-triton", severity=Severity.NOTE, if_unknown=True, concerns=_experts("TRITON"),
        fact=f"{{worker.mode}}: {_MOE}: TRITON is deprecated (#19035)",
        breaks="nothing yet: a later release refuses it",
        repair=f"{_MOE}: AUTO, the build's choice",
    ),
    KnownIssue(
        code="moe-blackwell", severity=Severity.NOTE, since="1.3.0rc24",
        concerns=_experts("CUTLASS", _B200),
        fact=f"{{worker.mode}}: {_MOE}: CUTLASS; NVIDIA now recommends TRTLLM on this GPU",
        breaks="nothing: one of the two is faster for your load",
        repair=f"measure {_MOE}: AUTO as well",
    ),
)  # fmt: skip


def known_issues(facts: Facts) -> Iterator[Finding]:
    """The known issues of the installed build, or of all builds if none is installed, for each worker."""
    if not facts.wants_tensorrt_llm:
        return
    version = facts.host.tensorrt_llm_version
    for issue in KNOWN:
        for worker in facts.workers:
            if is_in(issue, version) and worker.given and issue.concerns(facts, worker):
                found = f" (TensorRT-LLM {version})" if version else ""
                yield Finding(
                    severity=issue.severity,
                    code=issue.code,
                    fact=issue.fact.format(worker=worker) + found,
                    breaks=issue.breaks,
                    repair=issue.repair,
                )


def is_in(issue: KnownIssue, version: str) -> bool:
    """Whether a build has this issue; `version` is empty if unknown."""
    build = _build(version)
    if build is None:
        return issue.if_unknown
    since, before = _build(issue.since or ""), _build(issue.before or "")
    return (since is None or build >= since) and (before is None or build < before)


def _build(version: str) -> Build | None:
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.?rc(\d+))?", version)
    if found is None:
        return None
    major, minor, patch, candidate = found.groups()
    return int(major), int(minor), int(patch or 0), int(candidate) if candidate else _FINAL
