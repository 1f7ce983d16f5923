"""Requests in TensorRT-LLM's terms: when they may be aborted, their chunks, and errors."""

import asyncio
import contextlib
import dataclasses
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tensorrt_llm.executor.result import RequestPerfMetrics, TimingMetrics

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    EngineFailure,
    HandoffFailed,
    InvalidRequest,
    WorkerLost,
)
from baton.messages import Guided, MessageForm, TokenChunk, WorkerStats
from tests.planes import a_request
from workers.engines.library.adapter import Call
from workers.engines.library.model_facts import read_model_facts
from workers.engines.trtllm.adapter import TrtllmAdapter
from workers.engines.trtllm.library import load_library
from workers.engines.trtllm.settings import TRTLLM_RULES

FACTS = read_model_facts(Path("models/demo"))
ANY_TIME: dict[str, Any] = {}
RECEIVES: dict[str, Any] = {"transfer": {}}
SENDS: dict[str, Any] = {"hands_over": True}

FIELDS = "finish_reason", "stop_reason", "logprobs", "disaggregated_params"


class Result:
    """The object of every step: each sets these fields of its output, or raises; then it waits."""

    request_id = 1
    cached_tokens = decoding_iter = 0

    def __init__(self, *steps: Any) -> None:
        self.outputs = [SimpleNamespace(**dict.fromkeys(FIELDS), token_ids=[])]
        self.num_aborts = 0
        self._steps = list(steps)

    def abort(self) -> None:
        self.num_aborts += 1

    async def __anext__(self) -> "Result":
        if not self._steps:
            await asyncio.Event().wait()
        step = self._steps.pop(0)
        if isinstance(step, Exception):
            raise step
        vars(self.outputs[0]).update(step)
        return self


def adapter_of(result: Any, override: str = "{}", **more: Any) -> TrtllmAdapter:
    """An adapter whose LLM returns `result` for each request, or raises it; its submissions are recorded."""
    lib = load_library()
    loaded = TRTLLM_RULES.load(lib.args, "agg", override=override, typed={"model": "m"})
    adapter = TrtllmAdapter(loaded, lib, FACTS)

    def generate_async(*args: Any, **options: Any) -> Any:
        adapter.llm.submitted.append((*args, options))
        if isinstance(result, Exception):
            raise result
        return result

    adapter.llm = SimpleNamespace(generate_async=generate_async, submitted=[], **more)
    return adapter


def call_of(changes: dict[str, Any] | None = None, salt: str = "", **role: Any) -> Call:
    """A call whose request has these changes, also of its sampling."""
    request = replace(a_request(), handoff=None)
    changes = dict(changes or {})
    fields = {name: changes.pop(name) for name in ("num_generated", "priority") if name in changes}
    request = replace(request, sampling=replace(request.sampling, **changes), **fields)
    return Call(
        id="r-1", request=request, max_tokens=3, deadline=0, cache_salt=salt, num_lacking=lambda: 3, **role
    )


async def chunks_of(call: Call, *steps: Any) -> list[TokenChunk]:
    adapter = adapter_of(Result(*steps))
    adapter.submit(call)
    return [await adapter.step(call) for _ in steps]


@pytest.mark.parametrize("response", [{}, AssertionError("rejected")])
async def test_a_request_that_receives_kv_is_aborted_from_its_first_response_on(response: Any) -> None:
    result, call = Result(response), call_of(transfer={})
    adapter = adapter_of(result)
    adapter.submit(call)
    assert not await adapter.abort(call)
    with contextlib.suppress(AssertionError):
        await adapter.step(call)
    assert await adapter.abort(call)
    assert result.num_aborts == 1


@pytest.mark.parametrize(("token_ids", "stop_reason"), [([5, 6, 9], None), ([5, 6], 9), ([5, 6], None)])
async def test_the_stop_token_is_the_last_whether_the_build_tells_it_or_not(
    token_ids: list[int], stop_reason: int | None
) -> None:
    output = {"token_ids": token_ids, "finish_reason": "stop", "stop_reason": stop_reason}
    (chunk,) = await chunks_of(call_of({"stop_token_ids": (9, 8)}), output)
    assert (chunk.token_ids, chunk.finish_reason) == ((5, 6, 9), "stop")


@pytest.mark.parametrize(
    ("role", "times_s", "expected"),
    [
        (ANY_TIME, (1000, 1002, 1002.5, 0, 0), (2.0, 0.0, 0.5)),
        (SENDS, (1000, 1002, 1002.5, 0, 0), (2.0, 0.0, 0.5)),
        (RECEIVES, (1000, 1003, 1003.5, 1001, 1003), (1.0, 2.5, 0.0)),  # with the first step
        (RECEIVES, (1000, 1001, 1003.5, 1001, 1003), (1.0, 2.5, 0.0)),  # scheduled before its KV arrives
        (RECEIVES, (1000, 1001, 0, 0, 0), None),
    ],
)
async def test_a_request_has_waited_moved_and_computed_by_tensorrt_llms_clock(
    role: dict[str, Any], times_s: tuple[float, ...], expected: tuple[float, float, float] | None
) -> None:
    call = call_of(**role)
    call.spent.began_s -= 60
    names = [field.name for field in dataclasses.fields(TimingMetrics)]
    timing = TimingMetrics(**{n: timedelta(seconds=s) for n, s in zip(names, times_s, strict=True)})
    metrics = RequestPerfMetrics(timing)
    (chunk,) = await chunks_of(call, {"token_ids": [5], "request_perf_metrics": metrics})
    assert chunk.usage is not None
    waited_s, moved_s, computed_s = chunk.usage.waited_s, chunk.usage.moved_s, chunk.usage.computed_s
    if expected is None:  # unknown: all of it
        assert (waited_s, moved_s > 0, computed_s) == (0, True, 0)
    else:
        assert (waited_s, moved_s, computed_s) == expected


@pytest.mark.parametrize(("override", "num_right"), [('{"speculate": "lookup"}', 3), ("{}", 0)])
async def test_what_an_answer_has_more_than_its_steps_was_guessed(override: str, num_right: int) -> None:
    end = {"token_ids": [5, 6, 7, 8, 9], "finish_reason": "length"}
    adapter = adapter_of(result := Result({"token_ids": [5, 6, 7]}, end), override)
    result.decoding_iter = 2
    adapter.submit(call := call_of())
    for _ in range(2):
        await adapter.step(call)
    assert adapter.figures({call}).num_accepted_guesses == num_right


@pytest.mark.parametrize(("reason", "kind"), [("timeout", DeadlineExceeded), ("cancelled", WorkerLost)])
async def test_an_answer_that_did_not_end_by_itself_is_an_error(reason: str, kind: type[BatonError]) -> None:
    with pytest.raises(kind):
        await chunks_of(call_of(), {"finish_reason": reason, "token_ids": [5]})


@pytest.mark.parametrize(
    ("error", "role", "kind"),
    [
        (ValueError("too long"), ANY_TIME, InvalidRequest),
        (NotImplementedError("no beams"), SENDS, InvalidRequest),
        (load_library().request_error("too long"), ANY_TIME, InvalidRequest),
        (ValueError("no such endpoint"), RECEIVES, HandoffFailed),
        (AssertionError("odd"), ANY_TIME, EngineFailure),
        (TypeError("another signature"), ANY_TIME, WorkerLost),
    ],
    ids=repr,
)
def test_a_refused_submission_is_the_clients_or_the_handoffs_fault(
    error: Exception, role: dict[str, Any], kind: type[BatonError]
) -> None:
    with pytest.raises(kind, match=str(error)):
        adapter_of(error).submit(call_of(**role))


def form_of(*params: str) -> dict[str, Any]:
    """The sampling of a demanded form with messages of these fields."""
    last = tuple(
        MessageForm(headers=("h",), grammar=None if param == "free text" else "{}", end="e", param=param)
        for param in params
    )
    return {"guided": Guided(last=last)}


GRAMMAR, INTERNAL = "Guided decoding error: bad schema", "Guided decoding error: internal error"
REQUEST_ERROR = load_library().request_error


@pytest.mark.parametrize(
    ("error", "asked", "role", "kind", "param"),
    [
        (REQUEST_ERROR(GRAMMAR), form_of("tools[0]"), ANY_TIME, InvalidRequest, "tools[0]"),
        (REQUEST_ERROR(GRAMMAR), form_of("tools[0]", "tools[1]"), ANY_TIME, InvalidRequest, None),
        (REQUEST_ERROR(GRAMMAR), form_of("tools[0]", "free text"), ANY_TIME, InvalidRequest, "tools[0]"),
        (REQUEST_ERROR(INTERNAL), form_of("tools[0]"), ANY_TIME, EngineFailure, None),
        (REQUEST_ERROR("out of memory"), form_of("tools[0]"), ANY_TIME, EngineFailure, None),
        (REQUEST_ERROR(GRAMMAR), {}, ANY_TIME, EngineFailure, None),
        (REQUEST_ERROR("cut"), {}, RECEIVES, HandoffFailed, None),
        (REQUEST_ERROR("cut"), {}, RECEIVES | {"has_answered": True}, EngineFailure, None),
        (AssertionError(), {}, ANY_TIME, EngineFailure, None),
        (OSError("broken pipe"), {}, RECEIVES, WorkerLost, None),  # of no single request
    ],
)
def test_an_error_is_the_forms_the_handoffs_the_requests_or_the_engines(
    error: Exception, asked: dict[str, Any], role: dict[str, Any], kind: type[BatonError], param: str | None
) -> None:
    failure = adapter_of(None).failure(error, call_of(asked, **role))
    assert (type(failure), getattr(failure, "param", None)) == (kind, param)
    fatal = adapter_of(None, _executor=SimpleNamespace(_fatal_error="a rank died"))
    assert isinstance(fatal.failure(error, call_of(asked, **role)), WorkerLost)


def test_a_priority_that_the_build_lacks_is_the_clients_fault() -> None:
    adapter = adapter_of(None)
    adapter.llm = SimpleNamespace(generate_async=lambda inputs, sampling_params, streaming: None)  # noqa: ARG005
    with pytest.raises(InvalidRequest) as refused:
        adapter.submit(call_of({"priority": 5}))
    assert refused.value.param == "priority"


REUSES_APART = '{"cache_transceiver_config": {"backend": "UCX"}}'


@pytest.mark.parametrize(
    ("call", "extra"),
    [
        (call_of(), {"streaming": True, "cache_salt": "baton"}),  # a build may have no priorities
        (call_of(**SENDS), {"streaming": False, "cache_salt": "baton"}),
        (call_of(salt="own"), {"streaming": True, "cache_salt": "own"}),
        (call_of({"priority": 100}), {"streaming": True, "cache_salt": "baton", "priority": 0.0}),
        (call_of({"priority": -50}), {"streaming": True, "cache_salt": "baton", "priority": 0.75}),
    ],
)
def test_the_engine_is_given_salt_priority_and_whether_to_stream(call: Call, extra: dict[str, Any]) -> None:
    adapter = adapter_of(Result(), REUSES_APART)
    adapter.submit(call)
    ((token_ids, _, options),) = adapter.llm.submitted
    params = options.pop("disaggregated_params")
    assert (token_ids, options) == (call.request.token_ids, {"trace_headers": None} | extra)
    assert (params is not None) == call.hands_over


def test_no_two_handoffs_have_one_id() -> None:
    adapter = adapter_of(Result(), REUSES_APART)
    for _ in range(100):
        adapter.submit(call_of(**SENDS))
    ids = {options["disaggregated_params"].disagg_request_id for _, _, options in adapter.llm.submitted}
    assert len(ids) == 100
    assert all(1 << 40 <= found < 1 << 63 for found in ids)


SMALL = '{"max_batch_size": 2, "kv_cache_config": {"tokens_per_block": 2}'


@pytest.mark.parametrize(
    ("override", "num_open", "running"),
    [
        (SMALL + "}", 3, (2, 1)),
        (SMALL + ', "tensor_parallel_size": 4, "enable_attention_dp": true}', 9, (8, 1)),  # a batch per rank
        ('{"max_batch_size": null, "kv_cache_config": {"tokens_per_block": 2}}', 2049, (2048, 1)),
    ],
)
def test_figures_are_estimated_from_the_open_calls(
    override: str, num_open: int, running: tuple[int, int]
) -> None:
    calls = {call_of() for _ in range(num_open)}  # 3 tokens each
    next(iter(calls)).num_new_tokens = 4
    assert adapter_of(None, override).figures(calls | {call_of(kept={}, num_kept_blocks=2)}) == WorkerStats(
        num_running=running[0],
        num_waiting=running[1],
        kv_used_blocks=2 * (num_open - 1) + 4,
        kv_pinned_blocks=2,
    )
