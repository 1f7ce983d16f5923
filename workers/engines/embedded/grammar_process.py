"""The processes that compile forms and follow answers, so that no schema can stop or slow the engine.

`python -m workers.engines.embedded.grammar_process TOKENIZER VOCAB_SIZE` loads the tokenizer and forks a
process for each socket that it receives over its standard input. A small schema can crash the library or keep
it busy for hours: then the process ends, and with it the connection.
"""

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

SERVER_MODULE: Final = "workers.engines.embedded.grammar_process"
READY: Final = "ready"
STARTED: Final = b"+"
MEMORY_BYTES: Final = 256 << 20
CPU_S: Final = 0.5
"""CPU time of one answer at once; `_STEP_CPU_S` of it come back with each call."""
_STEP_CPU_S = 0.01
_NUM_COMPILED = 8
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


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """An answer's encoded `Guided` and all its tokens, native u32."""

    answer_id: int
    form: msgspec.Raw
    token_ids: bytes


class Next(msgspec.Struct, frozen=True, array_like=True):
    """`mask` has a bit for each token that may follow. Empty: any may, since the form is complete or, with a
    `refusal` of the field `param`, cannot be followed.
    """

    mask: bytes = b""
    refusal: str = ""
    param: str | None = None


KILLED: Final = bytes(4)
"""In place of a reply: the system ended the process, which is no schema's fault."""


def framed(message: Ask | Next) -> bytes:
    """The message after its length, 4 bytes."""
    encoded = msgspec.msgpack.encode(message)
    return len(encoded).to_bytes(4, "little") + encoded


def main() -> None:
    """Fork a process for each socket until the other end is closed. First replies READY, or what is wrong
    with the tokenizer.
    """
    control = socket.socket(fileno=sys.stdin.fileno())
    try:
        tokenizer = LLTokenizer(sys.argv[1], n_vocab=int(sys.argv[2]))
    except ValueError as error:
        control.sendall(str(error).encode())
        return
    control.sendall(READY.encode())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    while filenos := socket.recv_fds(control, 1, 1)[1]:
        connection = socket.socket(fileno=filenos[0])
        if os.fork() == 0:
            control.close()
            # The engine may close its end at any time.
            with suppress(OSError), connection:
                _run(tokenizer, connection)
            return
        connection.close()


def _run(tokenizer: LLTokenizer, connection: socket.socket) -> None:
    """Serve in a process of its own, and note if the system kills that, as for want of memory."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            connection.sendall(KILLED)
        return
    _limit_memory()
    connection.sendall(STARTED)
    _Holder(tokenizer).serve(connection)


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as sizes:
        num_pages = int(sizes.read().split()[5])  # data and stack
    limit_bytes = num_pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


class _Answer(msgspec.Struct):
    """An answer's matcher after `num_tokens`, and the CPU time that it has left. If it `shares` its lexer
    with earlier answers, these count towards the lexer's limits.
    """

    matcher: LLMatcher
    shares: bool
    left_s: float = CPU_S
    num_tokens: int = 0


class _Holder:
    """The forms and answers of one process, the most recent ones."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled: dict[bytes, LLMatcher] = {}
        self._answers: dict[int, _Answer] = {}

    def serve(self, connection: socket.socket) -> None:
        """Reply to each message until the other end is closed."""
        stream = connection.makefile("rwb")
        while size := stream.read(4):
            ask = msgspec.msgpack.decode(stream.read(int.from_bytes(size, "little")), type=Ask)
            stream.write(framed(self._reply(ask)))
            stream.flush()

    def _reply(self, ask: Ask) -> Next:
        answer = self._answers.pop(ask.answer_id, None)
        signal.setitimer(signal.ITIMER_PROF, answer.left_s if answer else CPU_S)  # then SIGPROF
        try:
            answer = answer or self._begin(ask.form)
            reply = _next(answer, ask)
            if reply.refusal and answer.shares:
                self._compiled.pop(bytes(ask.form), None)
                answer = self._begin(ask.form)
                reply = _next(answer, ask)
        except InvalidRequest as error:
            return Next(refusal=error.message, param=error.param)
        finally:
            left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        answer.left_s = min(left_s + _STEP_CPU_S, CPU_S)
        self._answers[ask.answer_id] = answer
        if len(self._answers) > _NUM_ANSWERS:
            del self._answers[next(iter(self._answers))]
        return reply

    def _begin(self, form: msgspec.Raw) -> _Answer:
        key = bytes(form)
        compiled = self._compiled.pop(key, None)
        shares = compiled is not None
        if compiled is None:
            compiled = compile_form(self._tokenizer, msgspec.msgpack.decode(form, type=Guided))
        self._compiled[key] = compiled
        if len(self._compiled) > _NUM_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        return _Answer(compiled.deep_copy(), shares)


def _next(answer: _Answer, ask: Ask) -> Next:
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
