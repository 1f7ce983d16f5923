"""The one form that an answer must have, under the API's own name for it or another server's."""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from baton.errors import InvalidRequest
from baton.messages import Syntax
from frontend.harmony.conversation import AnswerFormat, TextGrammar
from frontend.turn.fields import GuidedFields, JsonSchema, SamplingFields
from frontend.turn.form import any_object

_META = re.compile(r"[\\.+*?()|\[\]{}^$/-]")


def demanded_form(body: SamplingFields, response_format: AnswerFormat | None) -> AnswerFormat | None:
    """The one form that the body demands. Raises InvalidRequest, naming the second, if it demands two."""
    forms = [] if response_format is None else [response_format]
    forms += _forms(body)
    if len(forms) > 1:
        raise InvalidRequest(
            f"`{forms[1].path}` contradicts `{forms[0].path}`: demand one form of the answer.",
            param=forms[1].path,
        )
    return forms[0] if forms else None


def _forms(body: SamplingFields) -> Iterator[AnswerFormat]:
    yield from _guided(body, "")
    if body.nvext is not None:
        yield from _guided(body.nvext, "nvext.")
    if body.regex is not None:
        yield _text_form("regex", body.regex, "regex")
    if body.ebnf is not None:
        yield _text_form("ebnf", body.ebnf, "ebnf")
    asked = body.structured_outputs
    if asked is not None:
        path = "structured_outputs."
        names = {"json": asked.json, "regex": asked.regex, "choice": asked.choice, "grammar": asked.grammar}
        yield from (_form(kind, value, path + kind) for kind, value in names.items() if value is not None)
        if asked.json_object:
            yield any_object("structured_outputs.json_object")


def _guided(fields: GuidedFields, path: str) -> Iterator[AnswerFormat]:
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(fields, f"guided_{kind}")
        if value is not None:
            yield _form(kind, value, f"{path}guided_{kind}")


def _form(kind: str, value: Any, path: str) -> AnswerFormat:
    match kind:
        case "json":
            return AnswerFormat(schema=_schema(value, path), path=path)
        case "regex":
            return _text_form("regex", value, path)
        case "choice":
            return _text_form("regex", "|".join(_META.sub(r"\\\g<0>", choice) for choice in value), path)
        case _:
            return _text_form("ebnf" if "::=" in value else "lark", value, path)


def _text_form(syntax: Syntax, text: str, path: str) -> AnswerFormat:
    return AnswerFormat(schema=None, grammar=TextGrammar(syntax=syntax, text=text, path=path), path=path)


def _schema(value: JsonSchema, path: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    try:
        return msgspec.json.decode(value, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"`{path}` is not a JSON schema: {error}.", param=path) from None
