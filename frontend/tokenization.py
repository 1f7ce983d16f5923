"""`POST /tokenize` and `/detokenize`, and `GET /tokenizer_info`, in vLLM's shapes."""

import asyncio
from typing import Annotated, Literal

import msgspec

from baton.errors import InvalidRequest
from frontend.chat.request import InputMessage, ToolDefinition, tools, turns
from frontend.harmony.conversation import Conversation
from frontend.harmony.render import render
from frontend.http.body import decode, read
from frontend.http.exchange import Exchange, ignored_header
from frontend.http.services import Services
from frontend.metrics import Tally
from frontend.text.served import ServedModel
from frontend.text.specials import SpecialToken
from frontend.text.tokenizer import TooManyTokens
from frontend.turn.fields import NEAREST_EFFORT, AnyEffort, TemplateArgs, TokenId, effort_of, identity_of
from frontend.turn.raw_text import text_of, token_texts


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a `prompt` as in /v1/completions, or `messages` as in /v1/chat/completions. `model`
    is optional if there is only one. `add_special_tokens` has no effect. A prompt of more than two contexts
    is refused, not counted."""

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


async def tokenize(exchange: Exchange, services: Services, tally: Tally) -> None:
    """`POST /tokenize`."""
    async with services.bodies.read(exchange, services.max_body_bytes) as raw:
        body, ignored, prompt = await read(raw, _read)
    services.metrics.count_ignored(ignored)
    served = _served(body.model, services)
    tally.model = served.name

    def made() -> TokenizeAnswer:
        talk = prompt
        if isinstance(talk, Conversation):
            talk = services.thoughts.resumed(exchange.owner, talk, served.current_date)
        return _tokenized(talk, served, body)

    answer = await asyncio.to_thread(made)
    await exchange.answer(200, answer, ignored_header(ignored))


async def tokenizer_info(exchange: Exchange, services: Services, tally: Tally) -> None:
    """`GET /tokenizer_info`."""
    served = _served(None, services)
    tally.model = served.name
    end, pad = SpecialToken.RETURN.value, SpecialToken.ENDOFTEXT.value
    info = TokenizerInfo(eos_token=end, pad_token=pad, model_max_length=served.context_length)
    await exchange.answer(200, info)


async def detokenize(exchange: Exchange, services: Services, tally: Tally) -> None:
    """`POST /detokenize`."""
    async with services.bodies.read(exchange, services.max_body_bytes) as raw:
        body, ignored = await read(raw, lambda raw: decode(raw, DetokenizeBody))
    services.metrics.count_ignored(ignored)
    served = _served(body.model, services)
    tally.model = served.name
    prompt = await asyncio.to_thread(_detokenized, body.tokens, served)
    await exchange.answer(200, DetokenizeAnswer(prompt=prompt), ignored_header(ignored))


def _read(raw: bytes) -> tuple[TokenizeBody, tuple[str, ...], str | Conversation]:
    body, ignored = decode(raw, TokenizeBody)
    return body, ignored, _prompt(body)


def _served(model: str | None, services: Services) -> ServedModel:
    names = services.fleet.models()
    if model is None and len(names) != 1:
        allowed = ", ".join(names) or "none yet"
        raise InvalidRequest(
            f"`model` is missing; it is required unless one model is served. Available: {allowed}.",
            param="model",
        )
    return services.fleet.served(names[0] if model is None else model)


def _prompt(body: TokenizeBody) -> str | Conversation:
    match body.prompt, body.messages:
        case str() as text, None:
            return text
        case None, list() as messages:
            args = (body.chat_template_args, body.chat_template_kwargs)
            return Conversation(
                turns=turns(messages),
                tools=tools(body.tools or ()),
                reasoning_effort=NEAREST_EFFORT[effort_of(body.reasoning_effort, *args)],
                model_identity=identity_of(*args),
            )
        case _:
            raise InvalidRequest("Send either `prompt` or `messages`.", param="prompt")


def _tokenized(prompt: str | Conversation, served: ServedModel, body: TokenizeBody) -> TokenizeAnswer:
    try:
        tokens = _encoded(prompt, served, body.add_generation_prompt)
    except TooManyTokens:
        raise served.too_long("prompt" if isinstance(prompt, str) else "messages") from None
    return TokenizeAnswer(
        count=len(tokens),
        max_model_len=served.context_length,
        tokens=tokens,
        token_strs=token_texts(tokens, served.tokenizer) if body.return_token_strs else None,
    )


def _detokenized(token_ids: list[int], served: ServedModel) -> str:
    if len(token_ids) > served.max_counted_tokens:
        raise served.too_long("tokens")
    return text_of(served.tokenizer.checked(token_ids, served.name, "tokens"), served.tokenizer)


def _encoded(
    prompt: str | Conversation, served: ServedModel, add_generation_prompt: bool | None
) -> list[int]:
    limit = served.max_counted_tokens
    if isinstance(prompt, str):
        return served.tokenizer.encode_text(prompt, allow_special=True, limit=limit)
    segments = render(prompt)
    if add_generation_prompt is False:
        segments = segments[:-2]  # `<|start|>assistant`
    return served.tokenizer.encode_segments(segments, limit=limit)
