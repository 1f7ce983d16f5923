"""TensorRT-LLM's outputs as chunks, where builds differ."""

from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from tests.planes import a_request
from workers.engines.trtllm.calls import Call


def test_a_stop_token_that_the_build_leaves_out_is_added() -> None:
    request = a_request()
    request = replace(request, sampling=replace(request.sampling, stop_token_ids=(8, 9)))
    result: Any = SimpleNamespace(cached_tokens=0)
    output: Any = SimpleNamespace(finish_reason="stop", stop_reason=9, token_ids=[1], logprobs=None)
    chunk = Call(request, result, deadline=0.0).chunk(output)
    assert (chunk.token_ids, chunk.finish_reason) == ((1, 9), "stop")
