"""`POST /tokenize` and `/detokenize`, in vLLM's shapes."""

import asyncio
from collections.abc import Callable
from typing import Annotated, ClassVar, TypeVar

import msgspec

from baton.errors import InvalidRequest
from frontend.chat.request import ChatBody, InputMessage, ToolDefinition, conversation
from frontend.http.body import read
from frontend.http.exchange import Exchange, ignored_header
from frontend.http.respond import Operation, Operations, Serve, Services
from frontend.record import Record
from frontend.text.tokenizer import ServedModel
from frontend.turn.fields import AnyEffort, TemplateArgs, TokenId
from frontend.turn.request import RawPrompts, encode_prompt
from frontend.turn.thoughts import Thoughts


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a `prompt` as in /v1/completions, or `messages` as in /v1/chat/completions. A prompt
    of more than two contexts is refused, not counted."""

    shallow: ClassVar[frozenset[str]] = frozenset({"messages"})
    hints: ClassVar[frozenset[str]] = frozenset({"add_special_tokens"})

    model: str
    prompt: str | None = None
    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1)] | None = None
    tools: list[ToolDefinition] | None = None
    reasoning_effort: AnyEffort | None = None
    chat_template_args: TemplateArgs | None = None
    chat_template_kwargs: TemplateArgs | None = None


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """The tokens of a prompt; `max_model_len` is the model's context length in tokens."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /detokenize`: token ids, control tokens included; two contexts of them at most."""

    model: str
    tokens: list[TokenId]


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """The text, with control tokens spelled out."""

    prompt: str


Body = TypeVar("Body", TokenizeBody, DetokenizeBody)


def _route(
    body_type: type[Body], answer: Callable[[Body, str, ServedModel, Thoughts], msgspec.Struct]
) -> Serve:
    """The Serve of a body that `answer` answers in a thread, given the owner of the request."""

    async def serve(exchange: Exchange, services: Services, record: Record) -> None:
        body, ignored, _ = await services.bodies.use(
            exchange, services.max_body_bytes, lambda raw: read(raw, body_type, lambda *_: None)
        )
        served = services.fleet.served(body.model)
        record.model = served.name
        answered = await asyncio.to_thread(answer, body, exchange.owner, served, services.thoughts)
        services.metrics.count_ignored(ignored)
        await exchange.answer(200, answered, ignored_header(ignored))

    return serve


_CHAT_FIELDS = ("messages", "tools", "reasoning_effort", "chat_template_args", "chat_template_kwargs")


def _tokenized(body: TokenizeBody, owner: str, served: ServedModel, thoughts: Thoughts) -> TokenizeAnswer:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Send either `prompt` or `messages`.", param="prompt")
    if body.prompt is not None:
        (made,) = encode_prompt(RawPrompts((body.prompt,)), "prompt", owner, served, thoughts)
    else:
        chat = ChatBody(model="", **{name: getattr(body, name) for name in _CHAT_FIELDS})
        (made,) = encode_prompt(conversation(chat), "messages", owner, served, thoughts)
    tokens = made.token_ids
    return TokenizeAnswer(count=len(tokens), max_model_len=served.context_length, tokens=tokens)


def _text(body: DetokenizeBody, _owner: str, served: ServedModel, _thoughts: Thoughts) -> DetokenizeAnswer:
    if len(body.tokens) > served.max_counted_tokens:
        raise served.too_long("tokens")
    token_ids = served.tokenizer.checked(body.tokens, served.name, "tokens")
    return DetokenizeAnswer(prompt=served.tokenizer.decode(token_ids, shows_special=True))


TOKENIZATION: Operations = {
    ("POST", "/tokenize"): Operation(
        _route(TokenizeBody, _tokenized),
        "Tokenize a prompt",
        (TokenizeAnswer,),
        TokenizeBody,
        {"prompt": "Hello there!"},
    ),
    ("POST", "/detokenize"): Operation(
        _route(DetokenizeBody, _text),
        "Detokenize token ids",
        (DetokenizeAnswer,),
        DetokenizeBody,
        {"tokens": [0, 1]},
    ),
}
