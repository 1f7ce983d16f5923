"""`POST /tokenize` and `/detokenize`, and `GET /tokenizer_info`, in vLLM's shapes."""

import asyncio
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, TypeVar

import msgspec

from baton.errors import InvalidRequest
from frontend.chat.request import ChatBody, InputMessage, ToolDefinition, conversation
from frontend.http.body import read
from frontend.http.exchange import Exchange, ignored_header
from frontend.http.respond import Serve
from frontend.http.services import Services
from frontend.record import Record
from frontend.text.tokenizer import ServedModel, SpecialToken
from frontend.turn.fields import AnyEffort, TemplateArgs, TokenId
from frontend.turn.request import RawPrompts, encode_prompt
from frontend.turn.thoughts import Thoughts


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a `prompt` as in /v1/completions, or `messages` as in /v1/chat/completions. `model`
    is optional if there is only one. `add_special_tokens` has no effect. A prompt of more than two contexts
    is refused, not counted."""

    shallow: ClassVar[frozenset[str]] = frozenset({"messages"})

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    tools: list[ToolDefinition] | None = None
    reasoning_effort: AnyEffort | None = None
    chat_template_args: TemplateArgs | None = None
    chat_template_kwargs: TemplateArgs | None = None


class TokenizeAnswer(msgspec.Struct, kw_only=True):
    """The tokens of a prompt; `max_model_len` is the model's context length in tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /detokenize`: token ids, control tokens included; two contexts of them at most."""

    model: str | None = None
    tokens: list[TokenId]


class DetokenizeAnswer(msgspec.Struct, kw_only=True):
    """The text, with control tokens spelled out."""

    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The response of `GET /tokenizer_info`, for evaluation harnesses. There is no BOS token."""

    eos_token: str
    pad_token: str
    model_max_length: int
    bos_token: None = None
    chat_template: None = None
    tokenizer_class: Literal["PreTrainedTokenizerFast"] = "PreTrainedTokenizerFast"


async def tokenizer_info(exchange: Exchange, services: Services, record: Record) -> None:
    """`GET /tokenizer_info`."""
    length = _served(None, services, record).context_length
    end, pad = SpecialToken.RETURN.value, SpecialToken.ENDOFTEXT.value
    await exchange.answer(200, TokenizerInfo(eos_token=end, pad_token=pad, model_max_length=length))


def _served(model: str | None, services: Services, record: Record) -> ServedModel:
    names = services.fleet.models()
    if model is None and len(names) != 1:
        allowed = ", ".join(names) or "none yet"
        raise InvalidRequest(
            f"`model` is missing; it is required unless one model is served. Available: {allowed}.",
            param="model",
        )
    served = services.fleet.served(names[0] if model is None else model)
    record.model = served.name
    return served


Body = TypeVar("Body", TokenizeBody, DetokenizeBody)


def _route(
    body_type: type[Body], answer: Callable[[Body, str, ServedModel, Thoughts], msgspec.Struct]
) -> Serve:
    """The Serve of a body that `answer` answers in a thread, given the owner of the request."""

    async def serve(exchange: Exchange, services: Services, record: Record) -> None:
        body, ignored, _ = await services.bodies.use(
            exchange, services.max_body_bytes, lambda raw: read(raw, body_type, lambda *_: None)
        )
        served = _served(body.model, services, record)
        answered = await asyncio.to_thread(answer, body, exchange.owner, served, services.thoughts)
        services.metrics.count_ignored(ignored)
        await exchange.answer(200, answered, ignored_header(ignored))

    return serve


_CHAT_FIELDS = ("messages", "tools", "reasoning_effort", "chat_template_args", "chat_template_kwargs")


def _tokenized(body: TokenizeBody, owner: str, served: ServedModel, thoughts: Thoughts) -> TokenizeAnswer:
    tokenizer = served.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Send either `prompt` or `messages`.", param="prompt")
    if body.prompt is not None:
        (made,) = encode_prompt(RawPrompts((body.prompt,)), "prompt", owner, served, thoughts)
    else:
        chat = ChatBody(model="", **{name: getattr(body, name) for name in _CHAT_FIELDS})
        (made,) = encode_prompt(conversation(chat), "messages", owner, served, thoughts)
    tokens = made.token_ids
    if body.messages is not None and body.add_generation_prompt is False:
        tokens = tokens[: -len(tokenizer.encode_text("<|start|>assistant", allow_special=True))]
    return TokenizeAnswer(
        count=len(tokens),
        max_model_len=served.context_length,
        tokens=tokens,
        token_strs=[tokenizer.decode([token_id], shows_special=True) for token_id in tokens]
        if body.return_token_strs
        else None,
    )


def _text(body: DetokenizeBody, _owner: str, served: ServedModel, _thoughts: Thoughts) -> DetokenizeAnswer:
    if len(body.tokens) > served.max_counted_tokens:
        raise served.too_long("tokens")
    token_ids = served.tokenizer.checked(body.tokens, served.name, "tokens")
    return DetokenizeAnswer(prompt=served.tokenizer.decode(token_ids, shows_special=True))


tokenize = _route(TokenizeBody, _tokenized)
detokenize = _route(DetokenizeBody, _text)
