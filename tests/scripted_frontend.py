"""A frontend with a scripted model: byte-level tokenizer, scripted tokens, one-model fleet, ASGI client."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, models, pre_tokenizers

from baton.errors import BatonError, ModelNotFound
from baton.loop_delay import LoopDelay
from baton.messages import GenerateRequest, TokenChunk, TokenLogprob, Usage, WorkerInfo, WorkerStats
from frontend.app import create_app
from frontend.harmony.conversation import Conversation, render
from frontend.http.exchange import AsgiApp
from frontend.http.respond import Services
from frontend.record import Leg
from frontend.responses.runs import ResponseState
from frontend.responses.store import ResponseStore
from frontend.routing.health import Events, Health
from frontend.routing.workers import Event, State, Workers
from frontend.text.tokenizer import ModelTokenizer, ServedModel, SpecialToken
from frontend.turn.thoughts import Seal
from tests.scripted_workers import sampled
from tests.waiting import PATIENCE_S

MODEL = "toy/gpt-oss"
CONTEXT_LENGTH = 4096
HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi", "store": False},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
}


def byte_tokenizer() -> ModelTokenizer:
    """One token per byte (id = position in the byte alphabet), then Harmony's control tokens."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    ordinary = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    ordinary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    added = {token.value: len(vocab) + i for i, token in enumerate(SpecialToken)}
    return ModelTokenizer(ordinary, added)


TOKENIZER = byte_tokenizer()


async def _unprobed(worker: WorkerInfo, state: State) -> tuple[Event, str]:
    raise NotImplementedError


class ScriptedFleet:
    """One model, always live unless `error` is set."""

    def __init__(self, error: BatonError | None = None, context_length: int = CONTEXT_LENGTH) -> None:
        self.error = error
        self.current_date = "2026-11-21"
        self._context_length = context_length
        self.handoffs: Counter[tuple[str, str]] = Counter()
        self.events = Events()
        self.table = Workers(_unprobed, self.events, LoopDelay())

    def models(self) -> list[str]:
        return [MODEL]

    def served(self, model: str) -> ServedModel:
        if self.error is not None:
            raise self.error
        if model != MODEL:
            raise ModelNotFound(f"The model {model!r} is not served here.", param="model")
        return ServedModel(MODEL, self._context_length, TOKENIZER, self.current_date)

    async def look(self) -> Health:
        names = "endpoints", "instances", "missing", "warming", "lost", "cold_pairs", "refused_pairs"
        lists: dict[str, Any] = {name: [] for name in names}
        return Health(status="unhealthy" if self.error else "healthy", **lists)

    async def stats(self) -> list[tuple[WorkerInfo, WorkerStats]]:
        return []

    ask_all = stats


async def alone(_: object) -> Sequence[Any]:
    """No other process of the frontend answers."""
    return ()


class AliasedFleet(ScriptedFleet):
    """Serves its model under every name."""

    def served(self, model: str) -> ServedModel:
        return super().served(MODEL)


class ScriptedTokens:
    """Yields `texts[choice]`, Harmony with control tokens, a few tokens per chunk; records the requests
    and their callers.

    `ends` counts closed generators. With `pause_at`, generation waits at that token for `go_on`; with
    `fail_at`, it raises `error` there."""

    def __init__(
        self,
        *texts: str,
        tokens_per_chunk: int = 3,
        pause_at: int | None = None,
        fail_at: int | None = None,
        error: Exception | None = None,
        refuses_with: Exception | None = None,
    ) -> None:
        self._refuses_with = refuses_with
        self.requests: list[GenerateRequest] = []
        self.callers: list[str] = []
        self.go_on = asyncio.Event()
        self.paused = asyncio.Event()
        self.num_ended = 0
        self.texts = texts
        self._tokens_per_chunk = tokens_per_chunk
        self._pause_at = pause_at
        self._fail_at = fail_at
        self._error = error

    def check(self, model: str, caller: str, deadline_s: float) -> None:
        """There is room, unless `refuses_with` says why not."""
        if self._refuses_with is not None:
            raise self._refuses_with

    async def generate(
        self, request: GenerateRequest, caller: str, on_taken: Callable[[], None], leg: Leg
    ) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        self.callers.append(caller)
        on_taken()
        text = self.texts[request.sampling.choice % len(self.texts)]
        token_ids = TOKENIZER.encode_text(text, allow_special=True)
        limit = request.sampling.max_tokens
        finish_reason = "length" if limit < len(token_ids) else "stop"
        token_ids = token_ids[:limit]
        usage = Usage(len(request.token_ids), 2, len(token_ids))
        try:
            for start in range(0, len(token_ids), self._tokens_per_chunk):
                await asyncio.sleep(0)  # chunks arrive one at a time, as over a request plane
                await self._reach(start)
                ids = token_ids[start : start + self._tokens_per_chunk]
                first_usage = None if start else Usage(len(request.token_ids), 2, len(ids))
                chunk = TokenChunk(token_ids=tuple(ids), usage=first_usage, logprobs=_logprobs(request, ids))
                if start + len(ids) == len(token_ids):
                    scored = _prompt_logprobs(request)
                    chunk = msgspec.structs.replace(
                        chunk, finish_reason=finish_reason, usage=usage, prompt_logprobs=scored
                    )
                yield chunk
        finally:
            self.num_ended += 1

    async def _reach(self, position: int) -> None:
        if self._pause_at is not None and position >= self._pause_at:
            self.paused.set()
            await self.go_on.wait()
        if self._fail_at is not None and position >= self._fail_at:
            assert self._error is not None
            raise self._error


def _logprobs(request: GenerateRequest, ids: Sequence[int]) -> tuple[TokenLogprob, ...] | None:
    num_top = request.sampling.logprobs
    if num_top is None:
        return None
    return tuple(TokenLogprob(i, -0.5, ((i, -0.5), (7, float("-inf")))[:num_top]) for i in ids)


def _prompt_logprobs(request: GenerateRequest) -> tuple[TokenLogprob, ...] | None:
    num_top = request.sampling.prompt_logprobs
    if num_top is None:
        return None
    return tuple(TokenLogprob(i, -0.25, ((i, -0.25), (7, -3.0))[:num_top]) for i in request.token_ids[1:])


class Reply(msgspec.Struct):
    """What the client received; `writes` are the pieces of the body as they were sent."""

    status: int
    headers: dict[str, str]
    writes: list[bytes]

    @property
    def body(self) -> bytes:
        return b"".join(self.writes)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Each event's data as JSON; `[DONE]` stays text; comments and names are omitted."""
        lines = self.body.decode().split("\n")
        datas = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [data if data == "[DONE]" else json.loads(data) for data in datas]


def prompt_ids(conversation: Conversation, tokenizer: ModelTokenizer) -> list[int]:
    """The tokens of a conversation's prompt."""
    return tokenizer.encode_segments(render(conversation), limit=1 << 30)[0]


class Client:
    """Calls an app in this process over ASGI; disconnects when `gone` is done."""

    def __init__(
        self,
        tokens: ScriptedTokens,
        fleet: ScriptedFleet | None = None,
        *,
        responses: ResponseState | None = None,
        key: bytes | None = None,
        **settings: Any,
    ) -> None:
        self.tokens = tokens
        self.responses = responses or ResponseState()
        doubles: dict[str, Any] = {"fleet": fleet or ScriptedFleet(), "generator": tokens, "others": alone}
        self.services = Services(**doubles, seal=Seal(key), **settings)
        self.app: AsgiApp = create_app(self.services, self.responses)
        self.on_write: Callable[[bytes], None] = lambda _: None
        self.take: Callable[[Any], Awaitable[None]] | None = None

    @cached_property
    def gone(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    async def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Reply:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, raw, headers)

    async def chat(self, **fields: Any) -> Reply:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
        return await self.post("/v1/chat/completions", body)

    async def complete(self, prompt: object, **fields: Any) -> Reply:
        return await self.post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields})

    async def respond(self, given: object = "Hi", **fields: Any) -> Reply:
        return await self.post("/v1/responses", {"model": MODEL, "input": given, **fields})

    async def delete(self, path: str) -> Reply:
        return await self.request("DELETE", path, b"")

    async def get(self, path: str) -> Reply:
        return await self.request("GET", path, b"")

    @property
    def prompt(self) -> str:
        """The last one, without control tokens."""
        return TOKENIZER.decode(self.tokens.requests[-1].token_ids)

    def metric(self, name: str, **labels: str) -> float:
        value = sampled(self.services.metrics, name, **labels)
        return 0.0 if value is None else value

    async def request(
        self, method: str, path: str, raw: bytes, headers: dict[str, str] | None = None
    ) -> Reply:
        reply = Reply(0, {}, [])
        pending = [raw]

        async def receive() -> dict[str, Any]:
            if pending:
                return {"type": "http.request", "body": pending.pop(), "more_body": False}
            await asyncio.wait([self.gone])
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if self.take is not None:
                await self.take(message)
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {n.decode().lower(): v.decode() for n, v in message["headers"]}
            elif message.get("body"):
                reply.writes.append(message["body"])
                self.on_write(message["body"])

        path, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "path": path,
            "raw_path": path.encode(), "root_path": "", "scheme": "http", "query_string": query.encode(),
            "headers": [(n.encode(), v.encode()) for n, v in (headers or {}).items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "gone": self.gone,
        }  # fmt: skip
        await self.app(scope, receive, send)
        return reply


@asynccontextmanager
async def frontend(
    *texts: str, path: Path | None = None, script: dict[str, Any] | None = None, **settings: Any
) -> AsyncGenerator[Client, None]:
    """A frontend with its own store, closed at the end like in a shutdown."""
    state = ResponseState(ResponseStore(":memory:" if path is None else str(path)))
    await state.store.open()
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield Client(ScriptedTokens(*texts, **(script or {})), responses=state, **settings)
    finally:
        await state.close()


async def ended(client: Client, response_id: str) -> dict[str, Any]:
    """The response, after it has ended."""
    while True:
        body: dict[str, Any] = (await client.get(f"/v1/responses/{response_id}")).json
        if body["status"] != "in_progress":
            return body
        await asyncio.sleep(0.001)  # poll, like a client
