"""Checks of the settings that prefill and decode must agree on, and of those of KV transfers."""

from collections.abc import Iterator

from operations.doctor.facts import Facts, Worker
from operations.doctor.findings import Finding, error, warning
from workers.engines.trtllm.settings import BACKEND, BUFFER, MANAGER_V2, RUNTIME, manager


def pair(facts: Facts) -> Iterator[Finding]:
    """Can this decode worker take over this prefill worker's KV?"""
    prefill, decode = facts.worker("prefill"), facts.worker("decode")
    for worker in (prefill, decode):
        if worker and worker.given and facts.wants_tensorrt_llm:
            yield from _buffer(facts, worker)
    if prefill and decode and prefill.given and decode.given:
        yield from _equal(prefill, decode)
        yield from _lengths(prefill, decode)


def _buffer(facts: Facts, worker: Worker) -> Iterator[Finding]:
    context = facts.model.shape.max_positions if facts.model.shape else 131_072
    longest, room = int(worker.number("max_seq_len") or context), worker.number(BUFFER)
    if room is None:
        yield warning(
            "buffer-unset", f"{worker.place(BUFFER)} is not set",
            breaks="transfers of long prompts go through a small default buffer: slow, or they stall",
            repair=f"{BUFFER}: {longest}",
        )  # fmt: skip
    elif room < longest:
        yield error(
            "buffer-short", f"{worker.place(BUFFER)} {int(room):,} is below the longest prompt, {longest:,}",
            breaks="a longer prompt stalls prefill and decode forever (Dynamo #4327)",
            repair=f"{BUFFER}: {longest}, or max_seq_len: {int(room)} in both files",
        )  # fmt: skip


def _equal(prefill: Worker, decode: Worker) -> Iterator[Finding]:
    for code, key, default in (
        ("pair-dtype", "kv_cache_config.dtype", "auto"),
        ("pair-block", "kv_cache_config.tokens_per_block", "32"),
        ("pair-backend", BACKEND, ""),
        ("pair-runtime", RUNTIME, "auto"),
        ("pair-manager", MANAGER_V2, "auto"),
    ):
        one, other = (_word(worker, key, default) for worker in (prefill, decode))
        if one != other and one and other:
            yield error(
                code, f"{key}: {one} on prefill, {other} on decode",
                breaks="the pair is refused: neither can read the other's KV blocks",
                repair=f"set the same {key} in both files",
            )  # fmt: skip


def _word(worker: Worker, key: str, default: str) -> str:
    if key == MANAGER_V2:
        return manager(worker.text(RUNTIME, "auto"), worker.given.get(key, ("auto", ""))[0])
    return worker.text(key, default).lower()


def _lengths(prefill: Worker, decode: Worker) -> Iterator[Finding]:
    one, other = prefill.number("max_seq_len"), decode.number("max_seq_len")
    if one is not None and other is not None and other < one:
        yield error(
            "pair-length", f"max_seq_len: {int(one):,} on prefill, {int(other):,} on decode",
            breaks="decode refuses requests that prefill has already processed",
            repair=f"max_seq_len: {int(one)} in decode's file",
        )  # fmt: skip
