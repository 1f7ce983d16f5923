"""vLLM and TensorRT-LLM get the cache salt and the trace of a request with each of its prompts."""

from pathlib import Path
from typing import Any

import pytest

from baton.messages import after_handoff
from tests import trtllm_engine, vllm_engine
from tests.engine_calls import ask, handed_over, tokens
from workers.engines.library.engine import LibraryEngine

TRACE = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "a=1"}


async def given(prefill: LibraryEngine, decode: LibraryEngine, name: str, **fields: Any) -> list[Any]:
    """What the library got for a prefill, a decode with its handoff, and one without."""
    got: list[Any] = []
    for engine in (prefill, decode):
        setattr(library(engine), name, got)  # after the warm-up requests
    request = ask(**fields)
    async with handed_over(prefill, request) as handoff:
        assert await tokens(decode.decode(after_handoff(request, handoff)))
    assert await tokens(decode.decode(request))
    return got


def library(engine: LibraryEngine) -> Any:
    adapter: Any = engine.adapter
    return adapter.llm


@pytest.mark.parametrize(("salt", "sent"), [("alice", "alice"), ("", None)])
async def test_vllm_gets_them_with_every_prompt(checkpoint: Path, salt: str, sent: str | None) -> None:
    started = vllm_engine.started
    async with started(checkpoint) as prefill, started(checkpoint, "decode") as decode:
        assert await given(prefill, decode, "salts", cache_salt=salt) == [sent] * 3
        for trace in (TRACE, None):
            assert await given(prefill, decode, "traces", trace_headers=trace) == [trace] * 3


@pytest.mark.parametrize(("salt", "sent"), [("alice", "alice"), ("", "baton")])
async def test_tensorrt_llm_gets_them_with_every_prompt(checkpoint: Path, salt: str, sent: str) -> None:
    """Without one, the salt is Baton's own, which keeps prompts apart from attention DP's dummy requests."""
    async with trtllm_engine.started(checkpoint) as engine:
        assert await given(engine, engine, "salts", cache_salt=salt) == [sent] * 3
        for trace in (TRACE, None):
            assert await given(engine, engine, "traces", trace_headers=trace) == [trace] * 3
