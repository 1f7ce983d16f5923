"""`POST /tokenize`, in vLLM's shape: the tokens of a prompt."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, ClassVar

import msgspec

from baton.errors import InvalidRequest
from frontend.chat import ChatBody, InputMessage, ToolDefinition, conversation
from frontend.http.body import read
from frontend.http.respond import Operations, Services, counting
from frontend.text.tokenizer import ServedModel
from frontend.turn.fields import AnyEffort, TemplateArgs
from frontend.turn.request import Client, RawPrompts, encode_prompt


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


async def tokenize(
    raw: bytes, client: Client, services: Services
) -> tuple[str, Sequence[str], TokenizeAnswer]:
    """See `frontend.http.respond.Count`."""
    body, ignored, _ = await read(raw, TokenizeBody, lambda *_: None)
    served = services.fleet.served(body.model)
    return served.name, ignored, await asyncio.to_thread(_tokenized, body, client.owner, served, services)


_CHAT_FIELDS = ("messages", "tools", "reasoning_effort", "chat_template_args", "chat_template_kwargs")


def _tokenized(body: TokenizeBody, owner: str, served: ServedModel, services: Services) -> TokenizeAnswer:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("Send either `prompt` or `messages`.", param="prompt")
    if body.prompt is not None:
        (made,) = encode_prompt(RawPrompts((body.prompt,)), "prompt", owner, served, services.thoughts)
    else:
        chat = ChatBody(model="", **{name: getattr(body, name) for name in _CHAT_FIELDS})
        (made,) = encode_prompt(conversation(chat), "messages", owner, served, services.thoughts)
    tokens = made.token_ids
    return TokenizeAnswer(count=len(tokens), max_model_len=served.context_length, tokens=tokens)


TOKENIZATION: Operations = {
    ("POST", "/tokenize"): counting(
        tokenize, "Tokenize a prompt", TokenizeAnswer, TokenizeBody, {"prompt": "Hello there!"}
    )
}
