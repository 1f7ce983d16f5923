"""Compiles a request's form to an llguidance matcher, in a process that may be killed."""

import json
import re
from collections.abc import Iterable

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton.errors import InvalidRequest
from baton.messages import Guided, MessageForm

# llguidance's own limits, which end most slow schemas with a reason. Not all: the time of one step can grow
# with the cube of the alternatives. A lexer state takes 1-2 kB. An object with n optional properties becomes
# n * n / 2 items.
_LIMITS = LLParserLimits(
    max_lexer_states=50_000, max_grammar_size=200_000, step_max_items=250_000, verbose_errors=False
)
# Allows one-line and indented JSON; unlimited white space would let an unsure model write it forever.
_WHITE_SPACE = r" ?|\n[ \t]{0,16}"
_CONTROL = re.compile(r"(<\|\w+\|>)")
# In Lark, a name in angle brackets is a control token, `@` another grammar, and some directives import more
# of llguidance's. Inside quotes and comments they mean nothing.
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/')
_NOT_TEXT = re.compile(r"[<@]|%(?!ignore\b|import\s+common\b)")
# A control token has no text, so this matches none.
_TEXT = r"TEXT: /(.|\n)+/"
_ENDLESS = "no JSON value matches it: a `$ref` refers to itself, or a required value is infinite"


def compile_form(tokenizer: LLTokenizer, form: Guided) -> LLMatcher:
    """A matcher at the beginning of an answer. Raises InvalidRequest for forms that cannot be enforced."""
    matcher = LLMatcher(tokenizer, _grammar(form), log_level=0, limits=_LIMITS)
    messages = [message for message in form.last if message.grammar is not None]
    for message in messages:
        if matcher.is_error():
            problem = _problem_alone(tokenizer, message)
        else:
            problem = _problem_begun(tokenizer, matcher, message)
        if problem:
            raise InvalidRequest(f"`{message.param}` cannot be enforced: {problem}.", param=message.param)
    if matcher.is_error():
        raise InvalidRequest(f"The form cannot be enforced: {reason(matcher)}.", param=schema_param(form))
    return matcher


def reason(matcher: LLMatcher) -> str:
    """Why a failed matcher cannot continue, as part of a sentence."""
    text = matcher.get_error().partition("\n")[0].removesuffix(" <non-verbose/>").rstrip(".")
    return _ENDLESS if text.startswith("NoExtension") else text


def schema_param(form: Guided) -> str | None:
    """The name of the field that demanded the form."""
    return next((message.param for message in form.last if message.param is not None), None)


def _problem_alone(tokenizer: LLTokenizer, message: MessageForm) -> str:
    """The problem of this schema by itself, if any."""
    grammar = json.dumps({"grammars": [_body(message, "start")]})
    problem = LLMatcher.validate_grammar(grammar, tokenizer, limits=_LIMITS)
    return "" if problem.startswith("WARNING") else problem.rstrip(".")


def _problem_begun(tokenizer: LLTokenizer, matcher: LLMatcher, message: MessageForm) -> str:
    """The problem of the first JSON token, if any: only there does an endless `$ref` show."""
    begun = matcher.deep_copy()
    begun.try_consume_tokens(tokenizer.tokenize_str(message.headers[0], parse_special=True))
    if not begun.is_error():
        begun.compute_bitmask()
    return reason(begun) if begun.is_error() else ""


def _grammar(form: Guided) -> str:
    """The form in llguidance's format: a Lark grammar of messages, with a grammar for each schema."""
    times = "?" if form.leads_once else "*"
    lark = [f"start: ({_any_of('leading', form.leading)}){times} ({_any_of('last', form.last)})", _TEXT]
    bodies = []
    for kind, messages in (("leading", form.leading), ("last", form.last)):
        for i, message in enumerate(messages):
            name = f"{kind}_{i}"
            lark.append(f"{name}: {_message(name, message)}")
            if message.grammar is not None:
                bodies.append(_body(message, f"{name}_body"))
    return json.dumps({"grammars": [{"name": "start", "lark_grammar": "\n".join(lark)}, *bodies]})


def _any_of(kind: str, messages: Iterable[MessageForm]) -> str:
    return " | ".join(f"{kind}_{i}" for i, _ in enumerate(messages)) or '""'


def _message(name: str, message: MessageForm) -> str:
    headers = " | ".join(_literal(header) for header in message.headers)
    body = "TEXT?" if message.grammar is None else f"@{name}_body"
    return f"({headers}) {body} {_literal(message.end)}"


def _literal(text: str) -> str:
    """Control tokens as themselves, with the text between them quoted."""
    parts = [part for part in _CONTROL.split(text) if part]
    return " ".join(part if _CONTROL.fullmatch(part) else json.dumps(part) for part in parts) or '""'


def _body(message: MessageForm, name: str) -> dict[str, object]:
    match message.syntax:
        case "json_schema":
            return {"name": name, "json_schema": _schema(message)}
        case "regex":
            return {"name": name, "lark_grammar": f"start: BODY\nBODY: /{_in_slashes(message)}/"}
        case "lark":
            return {"name": name, "lark_grammar": _lark(message)}
        case "ebnf":
            raise InvalidRequest(
                f"`{message.param}`: this model's engine supports Lark grammars, not EBNF.",
                param=message.param,
            )


def _in_slashes(message: MessageForm) -> str:
    """The regular expression, which may be empty, for use between slashes in Lark."""
    # Lark has no escaped line break, but takes one as it is.
    instead = {"/": "\\/", "\\\n": "\n"}
    escaped = re.sub(r"(?s)\\.|/", lambda found: instead.get(found[0], found[0]), message.grammar or "")
    return f"(?:{escaped})"


def _lark(message: MessageForm) -> str:
    grammar = message.grammar or ""
    strange = _NOT_TEXT.search(_QUOTED.sub(" ", grammar))
    if strange is not None:
        raise InvalidRequest(
            f"`{message.param}`: {strange[0]!r} is not supported in a Lark grammar outside of quotes, except "
            "`%ignore` and `%import common`.",
            param=message.param,
        )
    return grammar


def _schema(message: MessageForm) -> dict[str, object]:
    try:
        schema = msgspec.json.decode(message.grammar or "{}", type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        problem = f"`{message.param}` is not a valid schema: {error}."
        raise InvalidRequest(problem, param=message.param) from error
    # The key of the library's own settings, which a client must not set.
    options = {"whitespace_pattern": _WHITE_SPACE, "lenient": message.lenient}
    return {**schema, "x-guidance": options}
