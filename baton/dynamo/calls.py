"""Calls to one worker on Dynamo's request plane, and whether it responds."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from baton.dynamo.bodies import dynamo_body, dynamo_replies
from baton.dynamo.cards import FOREIGN
from baton.dynamo.errors import error_of
from baton.dynamo.own import own_body, own_replies
from baton.errors import BatonError, DeadlineExceeded, WorkerLost
from baton.messages import (
    UNDECODABLE,
    GenerateRequest,
    KvHandoff,
    Request,
    StatsRequest,
    TokenChunk,
    WorkerInfo,
)
from baton.pace import TICK_S
from baton.streams import Replies

if TYPE_CHECKING:
    from dynamo.runtime import Client

CANARY_S = 7.0
"""How long an engine of Dynamo's may leave a canary unanswered, on top of computing the longest prompt."""
_CANARY_LIMIT_S = 70.0
_TOKENS_PER_S = 4000
_STOP_S = 5.0
_numbers = itertools.count()


class Call:
    """One running call; `handoff` is what prefill answered. A task of its own reads the binding's stream,
    since callers advance a generator from several tasks. No two calls may have one id at a time."""

    def __init__(self, instance: "Instance", request: Request) -> None:
        from dynamo.runtime import Context  # noqa: PLC0415  of an extra

        self._instance = instance
        self.request = request
        self._body = own_body(request) if instance.is_own else dynamo_body(request, instance.worker)
        self._limit_s = None if instance.is_own else _CANARY_LIMIT_S
        self.num_prompt_tokens, name, headers = 0, type(request).__name__, None
        if isinstance(request, GenerateRequest):
            self._limit_s, name, headers = request.deadline_s, request.request_id, request.trace_headers
            if not instance.is_own and request.handoff is None:
                self.num_prompt_tokens = len(request.token_ids)
        self._context = Context(f"{name}.{next(_numbers)}", headers)
        self.replies = Replies()
        self.handoff: KvHandoff | None = None
        self._is_open = self._is_left = self._is_complete = False
        self.task = asyncio.get_running_loop().create_task(self._run())

    def end(self, error: BatonError | None) -> None:
        """No more replies follow; the worker is asked to stop."""
        self.replies.end(error)
        self.leave()

    def leave(self) -> None:
        """Stop the worker's work, which ends the stream, once the worker has the request: KV may be held."""
        if not self._is_left and not self.task.done():
            self._is_left = True
            self.replies.leave()
            if self._is_open and not self._is_complete:
                self._context.stop_generating()
            stop = asyncio.get_running_loop().call_later(_STOP_S, self.task.cancel)
            self.task.add_done_callback(lambda _: stop.cancel())

    async def _run(self) -> None:
        worker, request, items = self._instance.worker, self.request, self._items()
        read = own_replies(items) if self._instance.is_own else dynamo_replies(request, worker, items)
        try:
            async with asyncio.timeout(self._limit_s):
                async for reply in read:
                    if isinstance(reply, KvHandoff):
                        self.handoff = reply
                    self._is_complete = isinstance(reply, TokenChunk) and reply.finish_reason is not None
                    await self.replies.put(reply)
        except TimeoutError:
            self.end(DeadlineExceeded())
        except BatonError as error:
            self.end(error)
        except UNDECODABLE as error:
            self.end(WorkerLost(f"worker {worker.label} sent what cannot be decoded: {error}"))
        except Exception as error:  # noqa: BLE001  the bindings raise ValueError, or Exception itself
            has_handoff = isinstance(request, GenerateRequest) and request.handoff is not None
            self.end(error_of(error, worker, has_handoff=has_handoff))
        finally:
            self.end(None)

    async def _items(self) -> AsyncGenerator[Any, None]:
        instance = self._instance
        direct = instance.client.direct
        stream = await direct(self._body, instance.number, annotated=False, context=self._context)
        self._is_open = True
        if self._is_left:
            self._context.stop_generating()
        async for item in stream:
            instance.num_silent = self.num_prompt_tokens = 0
            yield item


class Instance:
    """One instance of a worker, its running calls, and for how many ticks nothing came from it. A frozen
    worker keeps its registration and its connections, so a silent one gets a canary. A worker of Baton's is
    asked for its statistics, which its engine does not delay."""

    def __init__(self, client: "Client", number: int, worker: WorkerInfo, liveness_s: float) -> None:
        self.client = client
        self.number = number
        self.worker = worker
        self.is_own = worker.engine != FOREIGN
        self.calls: set[Call] = set()
        self._patience_s, self._canary_s = (liveness_s / 2,) * 2 if self.is_own else (liveness_s, CANARY_S)
        self.num_silent = 0
        self._canary: Call | None = None

    def begin(self, request: Request) -> Call:
        """Start a call. Raises NotResumable, InvalidRequest."""
        call = Call(self, request)
        self.calls.add(call)
        call.task.add_done_callback(lambda _: self.calls.discard(call))
        return call

    def probe(self) -> Call:
        """The running canary, or a new one."""
        if self._canary is None or self._canary.task.done():
            self._canary = self.begin(StatsRequest())
        return self._canary

    def tick(self) -> None:
        """Ask a worker that is silent; end its calls if it does not answer that."""
        if not self.calls:
            self.num_silent = 0
            return
        self.num_silent += 1
        silent_s = self.num_silent * TICK_S - self._patience_s
        longest = max(call.num_prompt_tokens for call in self.calls)
        if silent_s >= self._canary_s + longest / _TOKENS_PER_S:
            self.lose("it does not respond", is_silent=True)
        elif silent_s >= 0:
            self.probe()

    def lose(self, reason: str, *, is_silent: bool = False) -> None:
        """End every call with WorkerLost."""
        for call in list(self.calls):
            error = WorkerLost(f"worker {self.worker.label} was lost: {reason}")
            error.is_silent = is_silent
            call.end(error)
