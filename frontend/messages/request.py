"""Converts a Messages body into a TurnRequest."""

import re
from collections.abc import Iterator
from itertools import chain

import msgspec

from baton.errors import InvalidRequest
from frontend.harmony.conversation import (
    AnswerFormat,
    AssistantTurn,
    Conversation,
    Instructions,
    ToolCall,
    ToolResult,
    Turn,
    UserTurn,
)
from frontend.harmony.conversation import ReasoningEffort as Effort
from frontend.messages.answer import check_thread
from frontend.messages.body import Block, Content, Counted, MessagesBody, Source
from frontend.messages.tools import OfferedTools, call_choice, offered_tools
from frontend.turn.fields import NEAREST_EFFORT, CommonFields
from frontend.turn.request import Limits, TurnRequest
from frontend.turn.seal import Changed, Seal
from frontend.turn.thoughts import PARAGRAPH, joined

# Thinking budgets, in tokens, up to which the effort is low or medium.
_LOW_BUDGET = 2048
_MEDIUM_BUDGET = 12_000
# Claude Code's first line, for Anthropic, has a new checksum in each request: no cached KV would be found.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
# Other blocks come from Anthropic's servers, and may have an object as `content` or a string as `source`.
_OF_CLIENTS = frozenset(
    {"text", "image", "document", "search_result", "thinking", "redacted_thinking", "tool_use", "tool_result"}
)


class Reading:
    """Converts one body; `left_out` collects the paths of unsupported content, such as images."""

    def __init__(self, body: Counted, seal: Seal) -> None:
        self.left_out: set[str] = set()
        self._body = body
        self._seal = seal

    def turn_request(self, num_bytes: int) -> TurnRequest:
        """The request of a body of `num_bytes`. Raises ThreadNotFound or InvalidRequest, naming the field."""
        body = self._body
        answer = body if isinstance(body, MessagesBody) else None
        check_thread(None if answer is None else answer.thread)
        if answer is not None and body.messages[-1].role == "assistant":
            raise InvalidRequest(
                "The last message in `messages` must not have role 'assistant'; this model does not support "
                "prefilled answers.",
                param="messages",
            )
        choice = body.tool_choice
        offered = offered_tools(body)
        self.left_out.update(offered.left_out)
        limits = Limits(
            max_tokens=None if answer is None else answer.max_tokens,
            stop=None if answer is None else answer.stop_sequences,
            max_calls=1 if choice is not None and choice.disable_parallel_tool_use else None,
        )
        talk, chosen = self._conversation(offered), call_choice(body, offered)
        return TurnRequest.of(_fields(body), talk, limits, chosen, path="messages", num_bytes=num_bytes)

    def _conversation(self, offered: OfferedTools) -> Conversation:
        body = self._body
        system = _BILLING.sub("", self._text(body.system or "", "system"), count=1)
        instructions = [Instructions(system)] if system else []
        return Conversation(
            turns=(*instructions, *joined(self._turns())),
            tools=tuple(offered.tools),
            reasoning_effort=_effort(body),
            answer_format=_answer_format(body),
        )

    def _turns(self) -> Iterator[Turn]:
        for i, message in enumerate(self._body.messages):
            path = f"messages[{i}].content"
            match message.role:
                case "system":
                    yield Instructions(self._text(message.content, path))
                case "user":
                    yield from self._user(message.content, path)
                case "assistant" if isinstance(message.content, str):
                    yield AssistantTurn(text=message.content or None)
                case _:
                    yield from _one_answer([self._said(*part) for part in _blocks(message.content, path)])

    def _user(self, content: Content, path: str) -> Iterator[Turn]:
        """Tool results, then the user's text."""
        if isinstance(content, str):
            yield UserTurn(content)
            return
        texts: list[str] = []
        for where, block in _blocks(content, path):
            if block.type != "tool_result":
                texts += self._texts(block, where)
                continue
            call_id = _needed(block.tool_use_id, where, "tool_use_id")
            text = self._text(_content(block, where) or "", f"{where}.content")
            result = f"Error: {text}" if block.is_error else text
            yield ToolResult(call_id=call_id, text=result, path=f"{where}.tool_use_id")
        if texts:
            yield UserTurn("\n\n".join(texts))

    def _said(self, path: str, block: Block) -> AssistantTurn:
        match block.type:
            case "thinking":
                return AssistantTurn(reasoning=self._thought(block, path))
            case "tool_use":
                call = ToolCall(
                    call_id=_needed(block.id, path, "id"),
                    name=_needed(block.name, path, "name"),
                    arguments=msgspec.json.encode(block.input or {}).decode(),
                )
                return AssistantTurn(tool_calls=(call,))
            case _:
                return AssistantTurn(text="\n\n".join(self._texts(block, path)) or None)

    def _thought(self, block: Block, path: str) -> str | None:
        """This service's own reasoning, or None for another's. Raises InvalidRequest if it was changed."""
        text = block.thinking or ""
        try:
            if self._seal.is_ours(text, block.signature or ""):
                return text
        except Changed:
            raise InvalidRequest(
                f"`{path}.signature` does not match `{path}.thinking`; send thinking blocks back unchanged, "
                "or leave them out.",
                param=f"{path}.signature",
            ) from None
        self.left_out.add("messages[].content[].thinking")
        return None

    def _text(self, content: Content, path: str) -> str:
        if isinstance(content, str):
            return content
        texts = (self._texts(block, where) for where, block in _blocks(content, path))
        return "\n\n".join(chain.from_iterable(texts))

    def _texts(self, block: Block, path: str) -> Iterator[str]:
        """The block's text, if any; other content is replaced by a note and recorded in `left_out`."""
        match block.type, block.source:
            case "text", _:
                yield _needed(block.text, path, "text")
            case "document", Source(type="text", data=str(text)):
                yield from _headings(block)
                yield text
            case "document", Source(type="content", content=str() | list() as content):
                yield from _headings(block)
                yield self._text(content, f"{path}.source.content")
            case "search_result", _:
                yield _found(block, path)
            case "redacted_thinking" | "thinking", _:
                self.left_out.add("messages[].content[].thinking")
            case kind, _:
                self.left_out.add(f"messages[].content[].{kind}"[:80])
                yield f"[{kind[:40]} left out: this model reads text only]"


def _blocks(content: list[Block], path: str) -> Iterator[tuple[str, Block]]:
    """The path of each block, and the block. Raises InvalidRequest if its shape is not that of its type."""
    for i, block in enumerate(content):
        where = f"{path}[{i}]"
        if block.type in _OF_CLIENTS:
            _content(block, where)
            if isinstance(block.source, str) and block.type != "search_result":
                raise _misshapen(f"{where}.source", "must be an object, not a string")
        yield where, block


def _content(block: Block, path: str) -> Content | None:
    if isinstance(block.content, dict):
        raise _misshapen(f"{path}.content", "must be a string or an array, not an object")
    return block.content


def _one_answer(parts: list[AssistantTurn]) -> list[AssistantTurn]:
    """The parts of one message. Without a call, texts side by side, such as those of an answer with
    citations, are one final answer."""
    if any(part.tool_calls for part in parts):
        return parts
    merged: list[AssistantTurn] = []
    for part in parts:
        if part.text and merged and merged[-1].text:
            merged[-1] = AssistantTurn(text=f"{merged[-1].text}{PARAGRAPH}{part.text}")
        elif part != AssistantTurn():
            merged.append(part)
    return merged


def _headings(document: Block) -> Iterator[str]:
    """The title and the context of a document, if it has them."""
    yield from (text for text in (document.title, document.context) if isinstance(text, str) and text)


def _found(block: Block, path: str) -> str:
    """The text of a search result; all its blocks must be text."""
    content = _content(block, path)
    if not isinstance(content, list):
        return _needed(content, path, "content")
    parts = _blocks(content, f"{path}.content")
    return "\n\n".join(_needed(part.text, where, "text") for where, part in parts)


def _misshapen(path: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"`{path}`: {why}.", param=path)


def _fields(body: Counted) -> CommonFields:
    if not isinstance(body, MessagesBody):
        return CommonFields(model=body.model)
    return CommonFields(model=body.model, temperature=body.temperature, top_p=body.top_p, top_k=body.top_k)


def _needed(value: str | None, path: str, name: str) -> str:
    if value is None:
        raise InvalidRequest(f"`{path}.{name}` is missing.", param=f"{path}.{name}")
    return value


def _effort(body: Counted) -> Effort:
    """The nearest effort that gpt-oss has; it cannot turn reasoning off, so `disabled` is low."""
    if body.output_config is not None and body.output_config.effort is not None:
        return NEAREST_EFFORT[body.output_config.effort]
    thinking = body.thinking
    if thinking is not None and thinking.type == "disabled":
        return "low"
    if thinking is None or thinking.type == "adaptive" or thinking.budget_tokens is None:
        return "medium"
    if thinking.budget_tokens <= _LOW_BUDGET:
        return "low"
    return "medium" if thinking.budget_tokens <= _MEDIUM_BUDGET else "high"


def _answer_format(body: Counted) -> AnswerFormat | None:
    config = body.output_config
    if config is not None and config.format is not None:
        return AnswerFormat(
            schema=config.format.schema, name="answer", strict=True, path="output_config.format.schema"
        )
    if body.output_format is not None:
        return AnswerFormat(
            schema=body.output_format.schema, name="answer", strict=True, path="output_format.schema"
        )
    return None
