"""The processes that compile forms and follow answers, so that no schema can stop or slow the engine.

`python -m workers.engines.embedded.grammar_process TOKENIZER VOCAB_SIZE` loads the tokenizer and forks a
process for each socket that it gets. A small schema can crash the library or keep it busy for hours: then the
process ends, and its parent, which waits for it, replies."""

import json
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton.errors import InvalidRequest
from baton.messages import Guided, MessageForm

READY: Final = "ready\n"
MEMORY_BYTES: Final = 256 << 20
MAX_ASK_BYTES: Final = 1 << 20
"""Room for the largest form and the tokens of a whole context, 131,072."""
CPU_S: Final = 0.5
"""CPU time of one answer at once; `_STEP_CPU_S` of it come back with each call."""
_STEP_CPU_S = 0.01
_NUM_ANSWERS = 1024  # a few kB each
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
    matcher = _matcher(tokenizer, _grammars(form))
    for message in form.last:
        if message.grammar is not None and (problem := _problem(tokenizer, matcher, message)):
            raise InvalidRequest(f"`{message.param}` cannot be enforced: {problem}.", param=message.param)
    if matcher.is_error():
        raise InvalidRequest(f"The form cannot be enforced: {reason(matcher)}.", param=schema_param(form))
    return matcher


def reason(matcher: LLMatcher) -> str:
    """Why a failed matcher cannot continue, as part of a sentence."""
    text = matcher.get_error().partition("<non-verbose/>")[0].strip().rstrip(".")
    return _ENDLESS if text.startswith("NoExtension") else text


def schema_param(form: Guided) -> str | None:
    """The name of the field that demanded the form."""
    return next((message.param for message in form.last if message.param is not None), None)


def _matcher(tokenizer: LLTokenizer, grammars: list[dict[str, object]]) -> LLMatcher:
    return LLMatcher(tokenizer, json.dumps({"grammars": grammars}), log_level=0, limits=_LIMITS)


def _problem(tokenizer: LLTokenizer, whole: LLMatcher, message: MessageForm) -> str:
    """The problem of its grammar, if any: by itself if the `whole` has one, else where it begins, since an
    endless `$ref` shows in the first mask only."""
    if whole.is_error():
        begun = _matcher(tokenizer, [_body(message, "start")])
    else:
        begun = whole.deep_copy()
        begun.try_consume_tokens(tokenizer.tokenize_str(message.headers[0], parse_special=True))
    if not begun.is_error():
        begun.compute_bitmask()
    return reason(begun) if begun.is_error() else ""


def _grammars(form: Guided) -> list[dict[str, object]]:
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
    return [{"name": "start", "lark_grammar": "\n".join(lark)}, *bodies]


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


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """An answer's encoded `Guided` and all its tokens, native u32."""

    answer_id: int
    form: msgspec.Raw
    token_ids: bytes


class Next(msgspec.Struct, frozen=True, array_like=True):
    """`mask` has a bit for each token that may follow. Empty: any may, since the form is complete or, with a
    `refusal` of the field `param`, cannot be followed. `ended_by`: the process ended instead, by its exit
    code or, if negative, a signal."""

    mask: bytes = b""
    refusal: str = ""
    param: str | None = None
    ended_by: int = 0


def framed(message: Ask | Next) -> bytes:
    """The message after its length, 4 bytes."""
    encoded = msgspec.msgpack.encode(message)
    return len(encoded).to_bytes(4, "little") + encoded


def main() -> None:
    """Load the tokenizer, print READY or what is wrong with it, then fork a process for each socket that
    comes over the one that is stdin."""
    try:
        tokenizer = LLTokenizer(sys.argv[1], n_vocab=int(sys.argv[2]))
    except ValueError as error:
        sys.stdout.write(f"{error}\n")
        return
    sys.stdout.write(READY)
    sys.stdout.flush()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that end
    sockets = socket.socket(fileno=0)
    while filenos := socket.recv_fds(sockets, 1, 1)[1]:
        with socket.socket(fileno=filenos[0]) as connection:
            if os.fork():
                continue
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            sockets.close()
            # The engine may close its end at any time.
            with suppress(OSError):
                _watch(tokenizer, connection)
            return


def _watch(tokenizer: LLTokenizer, connection: socket.socket) -> None:
    """Serve in another process, and reply for it if it ends early."""
    if not (child := os.fork()):
        _limit_memory()
        _serve(tokenizer, connection)
        return
    _, status = os.waitpid(child, 0)
    if code := os.waitstatus_to_exitcode(status):
        connection.sendall(framed(Next(ended_by=code)))


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as sizes:
        num_pages = int(sizes.read().split()[5])  # data and stack
    limit_bytes = num_pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


class _Answer(msgspec.Struct):
    """An answer's matcher after `num_tokens`, and the CPU time that it has left."""

    matcher: LLMatcher | None = None
    left_s: float = CPU_S
    num_tokens: int = 0


def _serve(tokenizer: LLTokenizer, connection: socket.socket) -> None:
    """Reply to each message until the other end is closed; hold the most recent answers."""
    answers: dict[int, _Answer] = {}
    stream = connection.makefile("rb")
    # Once, before there are answers, which may use up the memory.
    room = memoryview(bytearray(MAX_ASK_BYTES))
    while size := stream.read(4):
        message = room[: int.from_bytes(size, "little")]
        stream.readinto(message)
        ask = msgspec.msgpack.decode(message, type=Ask)
        answer = answers[ask.answer_id] = answers.pop(ask.answer_id, _Answer())
        if len(answers) > _NUM_ANSWERS:
            del answers[next(iter(answers))]
        signal.setitimer(signal.ITIMER_PROF, answer.left_s)  # then SIGPROF
        try:
            reply = _next(tokenizer, answer, ask)
        except InvalidRequest as error:
            reply = Next(refusal=error.message, param=error.param)
        left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        answer.left_s = min(left_s + _STEP_CPU_S, CPU_S)
        connection.sendall(framed(reply))


def _next(tokenizer: LLTokenizer, answer: _Answer, ask: Ask) -> Next:
    if answer.matcher is None:
        answer.matcher = compile_form(tokenizer, msgspec.msgpack.decode(ask.form, type=Guided))
    matcher = answer.matcher
    token_ids = memoryview(ask.token_ids).cast("I")[answer.num_tokens :].tolist()
    answer.num_tokens += len(token_ids)
    is_followed = matcher.try_consume_tokens(token_ids) == len(token_ids)
    mask = b"" if matcher.is_stopped() or not is_followed else matcher.compute_bitmask()
    if matcher.is_error():
        problem = reason(matcher)
    elif is_followed or matcher.is_stopped():
        return Next(mask)
    else:
        problem = "the answer so far does not match it"
    return Next(refusal=f"The demanded form cannot be enforced any further: {problem}.")


if __name__ == "__main__":
    main()
