"""What Dynamo's workers are asked, and what becomes of their chunks and errors."""

from typing import Any

import msgspec
import pytest

from baton.dynamo.bodies import Decoded, Prefilled, dynamo_ask, dynamo_request, release_request
from baton.dynamo.errors import error_of
from baton.dynamo.messages import BYPASS, DynamoChunk
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
from baton.messages import (
    GenerateRequest,
    Guided,
    KvHandoff,
    MessageForm,
    Role,
    TokenChunk,
    TokenLogprob,
    after_handoff,
)
from tests.requests import token_request
from tests.scripted_workers import worker

FORM = Guided(last=(MessageForm(headers=("<|channel|>final<|message|>",), end="<|return|>", grammar="{}"),))


def asked(request: GenerateRequest, role: Role = Role.DECODE) -> Any:
    return msgspec.to_builtins(dynamo_request(request, role))


def greedy(**fields: Any) -> GenerateRequest:
    return token_request([1, 2, 3], **{"max_tokens": 9, "temperature": 0.0, "stop_token_ids": (7,)} | fields)


def chunk(**fields: Any) -> DynamoChunk:
    return msgspec.convert(fields, DynamoChunk)


def test_prefill_is_asked_for_one_token_and_decode_for_all_with_the_handoff() -> None:
    request = greedy(logprobs=2)
    reader = Prefilled(request, worker("p"))
    details = {"cached_tokens": 2}
    reader.take(chunk(token_ids=[5], disaggregated_params={"blocks": [1]}, completion_usage={
        "prompt_tokens_details": details}))  # fmt: skip
    reader.take(chunk(finish_reason="length"))
    (handoff,) = reader.end()
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


def test_decode_without_a_handoff_prefills_by_itself() -> None:
    assert asked(greedy())["annotations"] == [BYPASS]


def test_stop_tokens_priority_and_salt_are_in_dynamos_terms() -> None:
    request = greedy()
    body = asked(msgspec.structs.replace(request, priority=-100, cache_salt="s"))

    assert body["stop_conditions"]["stop_token_ids_hidden"] == [7]
    assert body["routing"] == {"priority": 100, "cache_salt": "s"}
    assert body["priority"] == 1.0
    assert asked(greedy(ignore_eos=True))["stop_conditions"] == {"max_tokens": 9, "ignore_eos": True}


def test_a_trace_goes_with_the_question() -> None:
    traced = msgspec.structs.replace(greedy(), trace_headers={"traceparent": "00-1-2-01"})
    assert dynamo_ask(traced, worker("d")).trace_headers == {"traceparent": "00-1-2-01"}


def test_a_demanded_form_becomes_a_structural_tag() -> None:
    options = asked(greedy(guided=FORM))["sampling_options"]

    assert '"structural_tag"' in options["guided_decoding"]["structural_tag"]


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


def test_only_a_sampled_answer_has_a_seed() -> None:
    assert asked(greedy(temperature=0.5, seed=3))["sampling_options"]["seed"] == 3
    assert "seed" not in asked(greedy(seed=3))["sampling_options"]


def test_cached_tokens_that_prefill_reported_are_in_the_first_usage() -> None:
    state = msgspec.json.encode({"prompt_tokens_details": {"cached_tokens": 2}, "disaggregated_params": "x"})
    handoff = KvHandoff(first_token=-1, num_prompt_tokens=3, ttl_s=9.0, engine_state=state)
    usage = Decoded(after_handoff(greedy(), handoff)).read(chunk(token_ids=[5])).usage

    assert usage is not None
    assert usage.num_cached_tokens == 2


def test_the_first_and_the_last_chunk_have_usage() -> None:
    reader = Decoded(greedy())
    usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 99}}

    first, then, last = (
        reader.read(chunk(token_ids=[5], completion_usage=usage)),
        reader.read(chunk(token_ids=[6])),
        reader.read(chunk(token_ids=[], finish_reason="length")),
    )

    assert first.usage is not None
    assert (first.usage.num_prompt_tokens, first.usage.num_cached_tokens) == (3, 3)
    assert then == TokenChunk((6,))
    assert last.usage is not None
    assert (last.finish_reason, last.usage.num_completion_tokens) == ("length", 2)


@pytest.mark.parametrize(
    ("last", "token_ids"),
    [
        ({"token_ids": [5], "finish_reason": "stop", "stop_reason": 7}, (5, 7)),
        ({"token_ids": [5, 7], "finish_reason": "stop", "stop_reason": 7}, (5, 7)),
        ({"token_ids": [5], "finish_reason": "eos"}, (5, 7)),
        ({"token_ids": [5], "finish_reason": "length"}, (5,)),
    ],
)
def test_a_stop_token_that_the_engine_leaves_out_is_added(
    last: dict[str, Any], token_ids: tuple[int, ...]
) -> None:
    assert Decoded(greedy()).read(chunk(**last)).token_ids == token_ids


def test_the_end_of_an_answer_is_found_without_a_finish_reason() -> None:
    stopped = Decoded(greedy()).read(chunk(token_ids=[5, 7, 6]))
    assert (stopped.token_ids, stopped.finish_reason) == ((5, 7), "stop")
    assert Decoded(greedy(min_tokens=1)).read(chunk(token_ids=[7])).finish_reason is None

    reader = Decoded(greedy(max_tokens=2))
    assert reader.read(chunk(token_ids=[5, 6])).finish_reason is None
    (last,) = reader.end()
    assert (last.token_ids, last.finish_reason) == ((), "length")


def test_a_stop_token_of_prefill_goes_to_decode_if_the_engine_hands_over() -> None:
    reader = Prefilled(greedy(), worker("p"))
    reader.take(chunk(token_ids=[7], disaggregated_params={"a": 1}))
    assert isinstance(next(reader.end()), KvHandoff)


def test_every_token_has_a_log_probability() -> None:
    tops = [[{"token_id": 5, "logprob": -0.5, "rank": 1}, {"token_id": 6, "logprob": -2.0}]]
    given = Decoded(greedy(logprobs=1)).read(chunk(token_ids=[5], log_probs=[-0.5], top_logprobs=tops))
    missing = Decoded(greedy(logprobs=1)).read(chunk(token_ids=[5, 6]))

    assert given.logprobs == (TokenLogprob(5, -0.5, ((5, -0.5),)),)
    assert missing.logprobs == (TokenLogprob(5, -9999.0), TokenLogprob(6, -9999.0))


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ({"error": "CUDA\nTraceback"}, EngineFailure),
        ("error", EngineFailure),
        ("error: no", EngineFailure),
        ("cancelled", WorkerLost),
        ("unheard of", EngineFailure),
    ],
)
def test_errors_as_data_are_raised(reason: object, kind: type[BatonError]) -> None:
    with pytest.raises(kind) as raised:
        Decoded(greedy()).read(chunk(finish_reason=reason))
    assert "Traceback" not in raised.value.message


@pytest.mark.parametrize("chunks", [[], [{"token_ids": [5], "finish_reason": "length"}]])
def test_prefill_without_parameters_for_decode_is_a_failed_handoff(chunks: list[dict[str, Any]]) -> None:
    reader = Prefilled(greedy(), worker("p"))
    for each in chunks:
        reader.take(chunk(**each))
    with pytest.raises(HandoffFailed):
        list(reader.end())


def test_an_answer_that_prefill_completes_needs_no_decode() -> None:
    reader = Prefilled(greedy(), worker("p"))
    reader.take(chunk(token_ids=[7], finish_reason="stop", disaggregated_params={"a": 1}))
    (reply,) = reader.end()
    assert isinstance(reply, TokenChunk)
    assert (reply.token_ids, reply.finish_reason) == ((7,), "stop")


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


def test_an_http_error_has_its_message_alone() -> None:
    error = ValueError('InvalidRequest: {"message":"The prompt is too long.","code":400}')
    refused = error_of(error, worker("d"), has_handoff=False)
    assert refused.message == "The engine refuses the request: The prompt is too long."


def test_a_refused_handoff_is_not_the_clients_fault() -> None:
    error = error_of(ValueError("InvalidRequest: TypeError: unknown key"), worker("d"), has_handoff=True)
    assert isinstance(error, HandoffFailed)
