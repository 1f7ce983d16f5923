"""Converts a Responses body and the items before it into a TurnRequest."""

from collections.abc import Callable, Iterator, Sequence

from baton.errors import InvalidRequest
from frontend.harmony.conversation import (
    AnswerFormat,
    Conversation,
    Instructions,
)
from frontend.responses.body import (
    LOGPROBS,
    ResponseBody,
    SchemaFormat,
)
from frontend.responses.items import Item
from frontend.responses.tools import OfferedTools, call_choice
from frontend.responses.turns import turns
from frontend.turn.fields import (
    GPT_OSS_EFFORTS,
    NEAREST_EFFORT,
    AnyEffort,
    JsonObjectFormat,
    effort_of,
    identity_of,
)
from frontend.turn.form import any_object, by_schema
from frontend.turn.request import TurnRequest


def check_served(body: ResponseBody) -> None:
    """Raises InvalidRequest for missing or contradictory fields."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("`stream_options` needs `stream`: true.", param="stream_options")
    if body.background and body.store is False:
        raise InvalidRequest("`background` needs `store`: true.", param="background")
    if not (body.input or body.instructions or body.previous_response_id):
        raise InvalidRequest(
            "`input` is missing; it is required without `instructions` or `previous_response_id`.",
            param="input",
        )


def turn_request(
    body: ResponseBody,
    offered: OfferedTools,
    history: Sequence[Item],
    items: Sequence[Item],
    num_bytes: int,
) -> TurnRequest:
    """The request of the body after `history`; `items` are its `input`, `num_bytes` is the length of both.
    Instructions are those of this body only: the API does not carry them over."""
    found = turns([*history, *items], _path_after(len(history)))
    leading = () if body.instructions is None else (Instructions(body.instructions),)
    args = (body.chat_template_args, body.chat_template_kwargs)
    talk = Conversation(
        turns=(*leading, *found),
        tools=tuple(offered.tools),
        namespaces=tuple(offered.namespaces),
        reasoning_effort=NEAREST_EFFORT[effort(body)],
        model_identity=identity_of(*args),
        answer_format=_answer_format(body),
    )
    return TurnRequest(
        model=body.model,
        prompt=talk,
        path="input",
        num_bytes=num_bytes,
        sampling=body,
        user=body.end_user,
        call_choice=call_choice(body, offered),
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if gives_logprobs(body) else None,
        max_calls=1 if body.parallel_tool_calls is False else None,
    )


def effort(body: ResponseBody) -> AnyEffort:
    """The reasoning effort, from whichever field gives it."""
    said = None if body.reasoning is None else body.reasoning.effort
    return effort_of(said, body.chat_template_args, body.chat_template_kwargs)


def not_enforced(body: ResponseBody, offered: OfferedTools) -> Iterator[str]:
    """Paths of known fields that are ignored or not honoured exactly."""
    yield from dict.fromkeys(offered.left_out)
    if effort(body) not in GPT_OSS_EFFORTS:
        yield "reasoning.effort"


def gives_logprobs(body: ResponseBody) -> bool:
    """Whether log probabilities are requested."""
    return LOGPROBS in (body.include or ()) or body.top_logprobs is not None


def _path_after(num_history: int) -> Callable[[int], str]:
    return lambda i: "previous_response_id" if i < num_history else f"input[{i - num_history}]"


def _answer_format(body: ResponseBody) -> AnswerFormat | None:
    match None if body.text is None else body.text.format:
        case JsonObjectFormat():
            return any_object("text.format")
        case SchemaFormat() as named:
            return by_schema(named, "text.format.schema")
        case _:
            return None
