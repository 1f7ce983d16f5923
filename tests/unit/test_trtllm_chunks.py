"""TensorRT-LLM's outputs as chunks, where builds differ."""

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from workers.engines.trtllm.calls import Call

from baton.errors import BatonError, DeadlineExceeded, WorkerLost
from baton.messages import TokenChunk, TokenLogprob, Usage
from tests.planes import a_request


def test_a_stop_token_that_the_build_leaves_out_is_added() -> None:
    request = a_request()
    request = replace(request, sampling=replace(request.sampling, stop_token_ids=(8, 9)))
    result: Any = SimpleNamespace(cached_tokens=0)
    output: Any = SimpleNamespace(finish_reason="stop", stop_reason=9, token_ids=[1], logprobs=None)
    chunk = Call(request, result, deadline=0.0).chunk(output)
    assert (chunk.token_ids, chunk.finish_reason) == ((1, 9), "stop")


def test_each_chunk_has_the_new_tokens_and_the_first_and_last_the_usage() -> None:
    request = replace(a_request(), num_generated=1)
    result: Any = SimpleNamespace(cached_tokens=2)
    call = Call(request, result, deadline=0.0)

    def chunk(reason: str | None, *token_ids: int) -> TokenChunk:
        output: Any = SimpleNamespace(finish_reason=reason, token_ids=[*token_ids], logprobs=None)
        return call.chunk(output)

    assert chunk(None, 5) == TokenChunk((5,), None, Usage(2, 2, 2))
    assert chunk(None, 5, 6) == TokenChunk((6,))
    assert chunk("length", 5, 6, 7, 8) == TokenChunk((7, 8), "length", Usage(2, 2, 5))


def test_each_chunk_has_the_log_probabilities_of_its_tokens() -> None:
    request = a_request()
    request = replace(request, sampling=replace(request.sampling, logprobs=0))
    result: Any = SimpleNamespace(cached_tokens=0)
    call = Call(request, result, deadline=0.0)
    told = [{5: SimpleNamespace(logprob=-0.5)}, {6: SimpleNamespace(logprob=-0.25)}]
    given = []
    for num in (1, 2):
        output: Any = SimpleNamespace(finish_reason=None, token_ids=[5, 6][:num], logprobs=told[:num])
        given.append(call.chunk(output).logprobs)
    assert given == [(TokenLogprob(5, -0.5, ()),), (TokenLogprob(6, -0.25, ()),)]


@pytest.mark.parametrize(("reason", "told"), [("timeout", DeadlineExceeded), ("cancelled", WorkerLost)])
def test_an_answer_that_did_not_end_by_itself_is_an_error(reason: str, told: type[BatonError]) -> None:
    result: Any = SimpleNamespace(cached_tokens=0)
    output: Any = SimpleNamespace(finish_reason=reason, token_ids=[5], logprobs=None)
    with pytest.raises(told):
        Call(a_request(), result, deadline=0.0).chunk(output)


def test_an_answer_that_the_engine_calls_unfinished_goes_on() -> None:
    result: Any = SimpleNamespace(cached_tokens=0)
    output: Any = SimpleNamespace(finish_reason="not_finished", token_ids=[5], logprobs=None)
    chunk = Call(a_request(), result, deadline=0.0).chunk(output)
    assert (chunk.token_ids, chunk.finish_reason) == ((5,), None)
