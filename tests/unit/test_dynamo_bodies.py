"""What Dynamo's workers are asked, and what becomes of their chunks and errors."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from baton.dynamo.bodies import dynamo_replies, dynamo_request, release_request
from baton.dynamo.errors import error_of
from baton.dynamo.messages import BYPASS, DynamoRequest, StopConditions
from baton.dynamo.own import own_body, own_request
from baton.errors import (
    BatonError,
    EngineFailure,
    HandoffFailed,
    InvalidRequest,
    NotResumable,
    Overloaded,
    WorkerLost,
    WorkerUnreached,
)
from baton.frames import MAX_FRAME_BYTES
from baton.messages import (
    GenerateRequest,
    Guided,
    KvHandoff,
    MessageForm,
    Role,
    TokenChunk,
    TokenLogprob,
    Usage,
    after_handoff,
)
from tests.requests import token_request
from tests.scripted_workers import worker

FORM = Guided(last=(MessageForm(headers=("<|channel|>final<|message|>",), end="<|return|>", grammar="{}"),))


def asked(request: GenerateRequest, role: Role = Role.DECODE) -> Any:
    return msgspec.to_builtins(dynamo_request(request, role))


def greedy(**fields: Any) -> GenerateRequest:
    return token_request([1, 2, 3], **{"max_tokens": 9, "temperature": 0.0, "stop_token_ids": (7,)} | fields)


async def replies(request: GenerateRequest, *chunks: dict[str, Any], of: str = "d") -> list[Any]:
    """What the caller gets of a decode worker, or a prefill worker, that sends these chunks."""

    async def items() -> AsyncIterator[Any]:
        for chunk in chunks:
            yield chunk

    return [reply async for reply in dynamo_replies(request, worker(of), items())]


async def test_prefill_is_asked_for_one_token_and_decode_for_all_with_the_handoff() -> None:
    request = greedy(logprobs=2)
    details = {"cached_tokens": 2}
    first = {"token_ids": [5], "disaggregated_params": {"blocks": [1]}}
    first["completion_usage"] = {"prompt_tokens_details": details}
    (handoff,) = await replies(request, first, {"finish_reason": "length"}, of="p")
    assert isinstance(handoff, KvHandoff)

    prefill = asked(request, Role.PREFILL)
    decode = asked(after_handoff(request, msgspec.structs.replace(handoff, incarnation="12")))

    assert prefill["stop_conditions"]["max_tokens"] == 1
    assert decode["stop_conditions"]["max_tokens"] == 9
    assert decode["token_ids"] == prefill["token_ids"] == [1, 2, 3]
    assert decode["prefill_result"] == {
        "disaggregated_params": {"blocks": [1]},
        "prompt_tokens_details": details,
    }
    assert decode["routing"] == {"prefill_worker_id": 12}
    assert "annotations" not in decode
    assert decode["output_options"] == {"logprobs": 2}


@pytest.mark.parametrize("num_generated", [0, 2])
def test_unwanted_kv_is_released_with_one_token_also_of_a_resumed_answer(num_generated: int) -> None:
    handoff = KvHandoff(incarnation="12", first_token=5, num_prompt_tokens=1, ttl_s=9.0, engine_state=b"{}")
    request = msgspec.structs.replace(greedy(temperature=1.0), num_generated=num_generated)
    body = asked(release_request(request, handoff))

    assert body["stop_conditions"] == {"max_tokens": 1, "ignore_eos": True}
    assert body["sampling_options"]["temperature"] == 0.0
    assert "prefill_result" in body


def test_a_request_is_in_dynamos_terms() -> None:
    body = asked(msgspec.structs.replace(greedy(guided=FORM), priority=-100, cache_salt="s"))

    assert body["annotations"] == [BYPASS], "without a handoff decode prefills by itself"
    assert body["stop_conditions"]["stop_token_ids_hidden"] == [7]
    assert body["routing"] == {"priority": 100, "cache_salt": "s"}
    assert body["priority"] == 1.0
    assert '"structural_tag"' in body["sampling_options"]["guided_decoding"]["structural_tag"]
    assert asked(greedy(ignore_eos=True))["stop_conditions"] == {"max_tokens": 9, "ignore_eos": True}
    assert "seed" not in asked(greedy(seed=3))["sampling_options"]
    assert asked(greedy(temperature=0.5, seed=3))["sampling_options"]["seed"] == 3


@pytest.mark.parametrize("fields", [{"temperature": 1.0}, {"guided": FORM}, {"presence_penalty": 1.0}])
def test_the_rest_of_an_answer_is_asked_only_if_it_would_go_on_as_it_began(fields: dict[str, Any]) -> None:
    resumed = msgspec.structs.replace(greedy(), token_ids=[1, 2, 3, 4], num_generated=1)
    assert asked(resumed)["stop_conditions"]["max_tokens"] == 8

    with pytest.raises(NotResumable):
        asked(msgspec.structs.replace(greedy(**fields), token_ids=[1, 2, 3, 4], num_generated=1))


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"logit_bias": {5: 1.0}}])
def test_what_no_worker_of_dynamos_does_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        asked(greedy(**fields))


async def test_cached_tokens_that_prefill_reported_are_in_the_first_usage() -> None:
    state = msgspec.json.encode({"prompt_tokens_details": {"cached_tokens": 2}, "disaggregated_params": "x"})
    handoff = KvHandoff(first_token=-1, num_prompt_tokens=3, ttl_s=9.0, engine_state=state)
    for details in (None, {"cached_tokens": None}):
        chunk = {"token_ids": [5], "completion_usage": {"prompt_tokens_details": details}}
        (reply,) = await replies(after_handoff(greedy(), handoff), chunk)
        assert reply.usage.num_cached_tokens == 2


async def test_the_first_and_the_last_chunk_have_usage() -> None:
    first, then, last = await replies(
        greedy(),
        {"token_ids": [5], "completion_usage": {"prompt_tokens_details": {"cached_tokens": 99}}},
        {"token_ids": [6]},
        {"token_ids": [], "finish_reason": "length"},
    )

    assert first.usage == Usage(3, 3, 1)
    assert then == TokenChunk((6,))
    assert last == TokenChunk((), "length", Usage(3, 3, 2))


@pytest.mark.parametrize(
    ("sent", "token_ids", "reason"),
    [
        ({"token_ids": [5], "finish_reason": "stop", "stop_reason": 7}, (5, 7), "stop"),
        ({"token_ids": [5, 7], "finish_reason": "stop", "stop_reason": 7}, (5, 7), "stop"),
        ({"token_ids": [5], "finish_reason": "eos"}, (5, 7), "stop"),
        ({"token_ids": [5], "finish_reason": "length"}, (5,), "length"),
        ({"token_ids": [5, 7, 6]}, (5, 7), "stop"),
    ],
)
async def test_the_stop_token_is_the_last_one_wherever_the_engine_leaves_it(
    sent: dict[str, Any], token_ids: tuple[int, ...], reason: str
) -> None:
    (reply,) = await replies(greedy(), sent)
    assert (reply.token_ids, reply.finish_reason) == (token_ids, reason)


async def test_an_answer_has_all_its_tokens_though_the_engine_does_not_say_that_it_ended() -> None:
    (more,) = await replies(greedy(min_tokens=1), {"token_ids": [7]})
    assert more.finish_reason is None

    *_, last = await replies(greedy(max_tokens=2), {"token_ids": [5, 6]})
    assert (last.token_ids, last.finish_reason) == ((), "length")


async def test_a_stop_token_of_prefill_goes_to_decode_if_the_engine_hands_over() -> None:
    (reply,) = await replies(greedy(), {"token_ids": [7], "disaggregated_params": {"a": 1}}, of="p")
    assert isinstance(reply, KvHandoff)


@pytest.mark.parametrize("params", [None, {"a": 1}])
async def test_an_answer_that_prefill_finished_needs_no_decode(params: object) -> None:
    sent = {"token_ids": [7], "finish_reason": "stop", "disaggregated_params": params}
    (reply,) = await replies(greedy(), sent, of="p")
    assert (reply.token_ids, reply.finish_reason) == ((7,), "stop")


async def test_every_token_has_a_log_probability() -> None:
    tops = [[{"token_id": 5, "logprob": -0.5, "rank": 1}, {"token_id": 6, "logprob": -2.0}]]
    given = {"token_ids": [5], "log_probs": [-0.5], "top_logprobs": tops}
    first, then = await replies(greedy(logprobs=1), given, {"token_ids": [5, 6]})

    assert first.logprobs == (TokenLogprob(5, -0.5, ((5, -0.5),)),)
    assert then.logprobs == (TokenLogprob(5, -9999.0), TokenLogprob(6, -9999.0))


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        ({"finish_reason": {"error": "CUDA\nTraceback"}}, EngineFailure),
        ({"finish_reason": "error"}, EngineFailure),
        ({"finish_reason": "error: no"}, EngineFailure),
        ({"finish_reason": "cancelled"}, WorkerLost),
        ({"finish_reason": "unheard of"}, EngineFailure),
    ],
)
async def test_errors_as_data_are_raised(sent: dict[str, Any], kind: type[BatonError]) -> None:
    with pytest.raises(kind) as raised:
        await replies(greedy(), sent)
    assert "Traceback" not in raised.value.message


@pytest.mark.parametrize("chunks", [[], [{"token_ids": [5], "finish_reason": "length"}]])
async def test_prefill_without_parameters_for_decode_is_a_failed_handoff(
    chunks: list[dict[str, Any]],
) -> None:
    with pytest.raises(HandoffFailed):
        await replies(greedy(), *chunks, of="p")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("InvalidRequest: ValueError: too long", InvalidRequest),
        ("Unavailable: Stream ended before generation completed", WorkerLost),
        ("DeadlineExceeded: no answer", WorkerLost),
        ("Unavailable: instance_id=5 not found for endpoint a/b", WorkerUnreached),
        ("Unavailable: No healthy TCP connection to 1.2.3.4:5 after 5 connect retries", WorkerUnreached),
        ("CapacityExhausted: Server overloaded: worker at capacity", Overloaded),
        ('RateLimited: {"message":"m","code":429}', Overloaded),
        ("Internal: KeyError: 'x'", EngineFailure),
        ("whatever it is", EngineFailure),
        ("", EngineFailure),
    ],
)
def test_the_prefix_of_an_errors_text_decides_its_kind(text: str, kind: type[BatonError]) -> None:
    assert type(error_of(ValueError(text), worker("d"), has_handoff=False)) is kind


def test_an_http_error_has_its_message_alone_and_a_refused_handoff_is_not_the_clients_fault() -> None:
    error = ValueError('InvalidRequest: {"message":"The prompt is too long.","code":400}')
    refused = error_of(error, worker("d"), has_handoff=False)
    assert refused.message == "The engine refuses the request: The prompt is too long."
    assert isinstance(error_of(error, worker("d"), has_handoff=True), HandoffFailed)


def test_a_request_has_only_what_is_set_and_survives_the_way() -> None:
    request = DynamoRequest(
        token_ids=[1, 2], stop_conditions=StopConditions(max_tokens=1), is_health_check=True
    )
    body = msgspec.to_builtins(request)

    asked = {"token_ids": [1, 2], "stop_conditions": {"max_tokens": 1}, "_HEALTH_CHECK": True}
    assert body == asked | {"sampling_options": {}}  # TensorRT-LLM reads it in any case
    assert msgspec.convert(body, DynamoRequest) == request


def test_batons_own_messages_have_a_limit() -> None:
    assert own_request(own_body(greedy())) == greedy()
    with pytest.raises(InvalidRequest, match="exceeds"):
        own_request(bytes(MAX_FRAME_BYTES + 1))
    with pytest.raises(InvalidRequest, match="exceeds"):
        own_body(msgspec.structs.replace(greedy(), cache_salt="s" * MAX_FRAME_BYTES))
