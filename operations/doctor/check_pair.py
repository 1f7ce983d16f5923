"""Checks of what prefill and decode have to agree on, and of what moves KV between them."""

from collections.abc import Iterator

from operations.doctor.facts import Facts, Worker
from operations.doctor.findings import Finding, error, warning

_BUFFER = "cache_transceiver_config.max_tokens_in_buffer"
_BACKEND = "cache_transceiver_config.backend"
_TIMEOUT = "cache_transceiver_config.kv_transfer_timeout_ms"
_BACKENDS = ("DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI")
_REUSE = "kv_cache_config.enable_block_reuse"


def pair(facts: Facts) -> Iterator[Finding]:
    """Can KV that this prefill worker makes be taken over by this decode worker?"""
    prefill, decode = facts.role("prefill"), facts.role("decode")
    for worker in (prefill, decode):
        if worker and worker.yaml and not worker.yaml.problem:
            yield from _transceiver(facts, worker)
            yield from _pinned(facts, worker)
    if (
        prefill
        and prefill.yaml
        and facts.wants_tensorrt_llm
        and not prefill.is_on("disable_overlap_scheduler")
    ):
        yield error(
            "overlap-prefill", f"{prefill.yaml.path}: disable_overlap_scheduler is not true",
            breaks="TensorRT-LLM's prefill side does not work with the overlap scheduler: hand-offs hang",
            repair="disable_overlap_scheduler: true",
        )  # fmt: skip
    if prefill and decode and prefill.yaml and decode.yaml:
        yield from _equal(prefill, decode)
        yield from _lengths(prefill, decode)


def _transceiver(facts: Facts, worker: Worker) -> Iterator[Finding]:
    assert worker.yaml is not None
    path, backend = worker.yaml.path, worker.text(_BACKEND, "")
    if not backend:
        if facts.wants_tensorrt_llm:
            yield error(
                "transceiver-none", f"{path}: no {_BACKEND}",
                breaks="TensorRT-LLM turns KV transfer off: no hand-off works",
                repair="cache_transceiver_config: {backend: UCX, max_tokens_in_buffer: 65536}",
            )  # fmt: skip
        return
    if backend.upper() not in _BACKENDS:
        yield error(
            "transceiver-unknown", f"{path}: {_BACKEND}: {backend} (known: {', '.join(_BACKENDS)})",
            breaks=f"the {worker.role} worker ends at start",
            repair=f"{_BACKEND}: UCX",
        )  # fmt: skip
    elif backend != backend.upper():
        yield warning(
            "transceiver-case", f"{path}: {_BACKEND}: {backend} is the spelling of older releases",
            breaks="Baton writes it in upper case; trtllm-serve and Dynamo with TensorRT-LLM 1.3 refuse it",
            repair=f"{_BACKEND}: {backend.upper()}",
        )  # fmt: skip
    if facts.wants_tensorrt_llm:
        yield from _buffer(facts, worker, path)


def _pinned(facts: Facts, worker: Worker) -> Iterator[Finding]:
    assert worker.yaml is not None
    path = worker.yaml.path
    if _TIMEOUT in worker.settings and worker.settings[_TIMEOUT] is None:
        yield error(
            "timeout-none", f"{path}: {_TIMEOUT}: null",
            breaks="KV that nobody fetches stays for ever; Baton refuses the file",
            repair=f"{_TIMEOUT}: 60000",
        )  # fmt: skip
    if facts.wants_tensorrt_llm and worker.role == "prefill" and worker.settings.get(_REUSE) is not False:
        yield warning(
            "reuse-prefill", f"{path}: {_REUSE} is not false",
            breaks="a reused block can be evicted before it is sent: the request hangs (TensorRT-LLM #12542)",
            repair=f"{_REUSE}: false, unless your build has the fix",
        )  # fmt: skip


def _buffer(facts: Facts, worker: Worker, path: str) -> Iterator[Finding]:
    context = facts.model.shape.max_positions if facts.model.shape else 131_072
    longest, room = int(worker.number("max_seq_len") or context), worker.number(_BUFFER)
    if room is None:
        yield warning(
            "buffer-unset", f"{path}: {_BUFFER} is not set",
            breaks="transfers of long prompts go through a small default buffer: slow, or they stall",
            repair=f"{_BUFFER}: {longest}",
        )  # fmt: skip
    elif room < longest:
        yield error(
            "buffer-short", f"{path}: {_BUFFER} {int(room):,} is below the longest prompt, {longest:,}",
            breaks="a longer prompt stalls prefill and decode for ever (Dynamo #4327)",
            repair=f"{_BUFFER}: {longest}, or max_seq_len: {int(room)} in both files",
        )  # fmt: skip


def _equal(prefill: Worker, decode: Worker) -> Iterator[Finding]:
    for code, key, default, upper in (
        ("pair-dtype", "kv_cache_config.dtype", "auto", False),
        ("pair-block", "kv_cache_config.tokens_per_block", "32", False),
        ("pair-backend", _BACKEND, "", True),
        ("pair-runtime", "cache_transceiver_config.transceiver_runtime", "auto", False),
    ):
        one, other = prefill.text(key, default), decode.text(key, default)
        same = one.upper() == other.upper() if upper else one == other
        if not same and one and other:
            yield error(
                code, f"{key}: {one} on prefill, {other} on decode",
                breaks="the pair is refused: neither can read the other's KV blocks",
                repair=f"write the same {key} in both files",
            )  # fmt: skip
    for worker in (prefill, decode):
        if (worker.number("max_beam_width") or 1) > 1:
            yield error(
                "pair-beam", f"{worker.role}: max_beam_width is above 1",
                breaks="KV transfer knows no beam search",
                repair="max_beam_width: 1",
            )  # fmt: skip


def _lengths(prefill: Worker, decode: Worker) -> Iterator[Finding]:
    one, other = prefill.number("max_seq_len"), decode.number("max_seq_len")
    if one is not None and other is not None and other < one:
        yield error(
            "pair-length", f"max_seq_len: {int(one):,} on prefill, {int(other):,} on decode",
            breaks="decode refuses requests that prefill has already worked on",
            repair=f"max_seq_len: {int(one)} in decode's file",
        )  # fmt: skip
