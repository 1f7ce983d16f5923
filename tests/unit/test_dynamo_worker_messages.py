"""Dynamo's requests as a worker of Baton's reads them, and its replies as Dynamo reads them."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.dynamo.messages import DynamoChunk, DynamoRequest
from baton.dynamo.worker_messages import dynamo_chunk, generate_request, prefill_answer
from baton.errors import HandoffFailed, InvalidRequest
from baton.messages import GenerateRequest, KvHandoff, Role, TokenChunk, TokenLogprob, Usage, WorkerInfo
from tests.scripted_workers import worker

START = 90
CARD = worker("d", kv_transfer="tcp", checkpoint="c", context_length=1000)
PREFILL = msgspec.structs.replace(CARD, role=Role.PREFILL, worker_id="prefill-1")
HANDOFF = KvHandoff(first_token=7, num_prompt_tokens=3, ttl_s=60.0, engine_state=b"\x00\xffkv")


def request(card: WorkerInfo = CARD, token_ids: tuple[int, ...] = (1, 2, 3), **body: Any) -> GenerateRequest:
    sent = msgspec.convert({"token_ids": list(token_ids), "model": "m"} | body, DynamoRequest, str_keys=True)
    return generate_request(sent, card, "r1", START)


def test_what_dynamos_frontend_sends_by_default_is_an_unlimited_sampled_answer() -> None:
    null = dict.fromkeys(("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"))
    asked = request(
        stop_conditions=null | {"stop_token_ids_hidden": [9, 8]},
        sampling_options=dict.fromkeys(("n", "temperature", "top_p", "top_k", "seed", "guided_decoding")),
        output_options={"logprobs": None, "skip_special_tokens": False},
        eos_token_ids=[9, 5],
        mdc_sum="85a9",
        router_config_override=None,
    )
    assert (asked.request_id, asked.token_ids, asked.num_generated) == ("r1", [1, 2, 3], 0)
    sampling = asked.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (1000, 1.0, 1.0, 0)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.logprobs) == ((9, 8, 5), False, None)
    assert not sampling.is_seeded


def test_each_option_is_taken_over() -> None:
    options = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": -3, "n": 1}
    options |= {"frequency_penalty": 0.2, "presence_penalty": 0.3, "repetition_penalty": 1.1}
    asked = request(
        stop_conditions={"max_tokens": 20, "min_tokens": 4, "ignore_eos": True, "stop_token_ids": [6]},
        sampling_options=options | {"logit_bias": {"5": -1.0}},
        output_options={"logprobs": 2},
        routing={"priority": 7, "cache_salt": "s"},
    )
    found = msgspec.structs.asdict(asked.sampling)
    assert {name: found[name] for name in options if name not in ("n", "seed")} == {
        name: value for name, value in options.items() if name not in ("n", "seed")
    }
    assert (asked.sampling.seed, asked.sampling.is_seeded) == (2**63 - 3, True)
    assert (asked.sampling.max_tokens, asked.sampling.min_tokens, asked.sampling.ignore_eos) == (20, 4, True)
    assert (asked.sampling.logit_bias, asked.sampling.logprobs) == ({5: -1.0}, 2)
    assert (asked.priority, asked.cache_salt) == (-7, "s")


def test_prefill_is_not_limited_to_the_one_token_that_dynamos_frontend_asks_of_it() -> None:
    assert request(PREFILL, stop_conditions={"max_tokens": 1}).sampling.max_tokens == CARD.context_length


@pytest.mark.parametrize(
    ("demanded", "syntax", "grammar"),
    [
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["a.b", "c"]}, "regex", r"a\.b|c"),
        ({"grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
    ],
)
def test_a_form_holds_for_a_conversations_final_message_and_for_a_whole_completion(
    demanded: dict[str, Any], syntax: str, grammar: str
) -> None:
    options = {"guided_decoding": demanded | {"backend": None}}
    chat = request(token_ids=(1, START, 4), sampling_options=options).sampling.guided
    raw = request(token_ids=(1, 2, 3), sampling_options=options).sampling.guided
    assert chat is not None
    assert raw is not None
    assert [form.headers for form in (*chat.leading, *chat.last)] == [
        ("<|channel|>analysis<|message|>",),
        ("<|channel|>final<|message|>",),
    ]
    assert chat.leads_once
    assert (raw.leading, raw.last[0].headers) == ((), ("",))
    assert {(form.syntax, form.grammar) for form in (*chat.last, *raw.last)} == {(syntax, grammar)}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search"),
        ({"sampling_options": {"guided_decoding": {"structural_tag": {}}}}, "guided_decoding"),
        ({"sampling_options": {"guided_decoding": {"regex": "a", "json": {}}}}, "guided_decoding"),
    ],
)
def test_what_is_not_served_is_refused_by_name(body: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        request(**body)
    assert refused.value.param == named


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"sampling_options": {"n": 2}}, "n"),
        ({"sampling_options": {"temperature": -1.0}}, "temperature"),
        ({"sampling_options": {"top_p": float("nan")}}, "top_p"),
        ({"output_options": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"stop_conditions": {"max_tokens": 0}}, "max_tokens"),
        ({"stop_conditions": {"min_tokens": -1}}, "min_tokens"),
        ({"sampling_options": {"logit_bias": {"a": 1.0}}}, "logit_bias"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(body: dict[str, Any], named: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=rf"{named}`$"):
        request(**body)


TOKEN_IDS = st.lists(st.integers(0, 200_000), min_size=1, max_size=8).map(tuple)
HANDOFFS = st.builds(
    KvHandoff,
    worker_id=st.text(max_size=8),
    first_token=st.integers(-1, 200_000),
    num_prompt_tokens=st.integers(1, 1 << 20),
    ttl_s=st.floats(0.1, 1e4),
    engine_state=st.binary(max_size=200),
    first_chunk=st.none() | st.builds(TokenChunk, TOKEN_IDS),
)
ENDED = st.builds(TokenChunk, TOKEN_IDS, st.just("length"), st.builds(Usage, *[st.integers(0, 99)] * 3))


@given(reply=HANDOFFS | ENDED)
def test_what_prefill_gives_to_decode_arrives_unchanged(reply: KvHandoff | TokenChunk) -> None:
    sent = msgspec.json.encode(dynamo_chunk(reply, PREFILL))
    read = msgspec.json.decode(sent, type=DynamoChunk)
    assert read.finish_reason == "length"
    assert read.token_ids
    assert prefill_answer(read.disaggregated_params, CARD) == reply


def test_an_answer_that_prefill_finished_with_a_stop_token_needs_no_decode() -> None:
    chunk = dynamo_chunk(TokenChunk((9,), "stop"), PREFILL)
    assert (chunk.token_ids, chunk.finish_reason, chunk.disaggregated_params) == ((9,), "stop", None)


@pytest.mark.parametrize("params", [None, "dummy", {}, {"other": {}}, {"baton": 5}, {"baton": {}}])
def test_a_handoff_that_is_not_batons_is_refused(params: object) -> None:
    with pytest.raises(HandoffFailed):
        prefill_answer(params, CARD)


@pytest.mark.parametrize(("name", "value"), [("engine", "vllm"), ("checkpoint", "d"), ("kv_transfer", "ucx")])
def test_a_handoff_of_another_fleet_is_refused_with_both_values(name: str, value: str) -> None:
    other = msgspec.structs.replace(PREFILL, **{name: value})
    params = dynamo_chunk(HANDOFF, other).disaggregated_params
    with pytest.raises(HandoffFailed) as refused:
        prefill_answer(params, CARD)
    assert value in refused.value.message
    assert getattr(CARD, name) in refused.value.message


def test_a_chunk_has_a_log_probability_for_each_token_and_the_counts_of_this_request() -> None:
    logprobs = (TokenLogprob(5, -0.1, ((5, -0.1), (6, -2.0))), TokenLogprob(7, -0.2))
    chunk = dynamo_chunk(TokenChunk((5, 7), "stop", Usage(10, 4, 3), logprobs), CARD)
    assert chunk.log_probs == [-0.1, -0.2]
    assert chunk.top_logprobs is not None
    assert [(top.token_id, top.rank) for top in chunk.top_logprobs[0]] == [(5, 1), (6, 2)]
    assert [top.token_id for top in chunk.top_logprobs[1]] == [7]
    usage = chunk.completion_usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 3, 13)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 4
