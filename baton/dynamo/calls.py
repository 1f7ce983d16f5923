"""Calls to one worker on Dynamo's request plane, and whether it responds."""

import asyncio
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from baton.dynamo.asks import Ask
from baton.dynamo.bodies import canary, dynamo_ask
from baton.dynamo.cards import FOREIGN
from baton.dynamo.errors import error_of
from baton.dynamo.own import own_ask
from baton.errors import BatonError, DeadlineExceeded, InvalidRequest, WorkerLost
from baton.messages import UNDECODABLE, GenerateRequest, Reply, Request, StatsRequest, TokenChunk, WorkerInfo
from baton.pace import TICK_S
from baton.streams import Replies

if TYPE_CHECKING:
    from dynamo.runtime import Client

CANARY_S = 7.0
"""How long an engine of Dynamo's may leave a canary unanswered; longer by the length of the longest prompt
that waits, since it may compute that first."""
_TOKENS_PER_S = 4000
_STOP_S = 5.0
_numbers = itertools.count()


class Call:
    """One running call. A task of its own reads the binding's stream, since callers advance a generator from
    several tasks. Dynamo's runtime refuses two calls with the same id at a time.
    """

    def __init__(self, instance: "Instance", ask: Ask) -> None:
        from dynamo.runtime import Context  # noqa: PLC0415  of an extra

        self.replies = Replies()
        self.num_prompt_tokens = ask.num_prompt_tokens
        self._context = Context(f"{ask.name}.{next(_numbers)}", ask.trace_headers)
        self._instance = instance
        self._ask = ask
        self._is_open = self._is_left = self._is_complete = False
        self.task = asyncio.get_running_loop().create_task(self._run())

    def end(self, error: BatonError | None) -> None:
        """No more replies follow; the worker is asked to stop."""
        self.replies.end(error)
        self.leave()

    def leave(self) -> None:
        """Stop the worker's work, which ends the stream at once; but not before the worker has the request,
        for which KV may be held.
        """
        if not self._is_left and not self.task.done():
            self._is_left = True
            self.replies.leave()
            if self._is_open and not self._is_complete:
                self._context.stop_generating()
            stop = asyncio.get_running_loop().call_later(_STOP_S, self.task.cancel)
            self.task.add_done_callback(lambda _: stop.cancel())

    async def _run(self) -> None:
        worker = self._instance.worker
        try:
            async with asyncio.timeout(self._ask.limit_s):
                await self._read()
        except TimeoutError:
            self.end(DeadlineExceeded())
        except BatonError as error:
            self.end(error)
        except UNDECODABLE as error:
            self.end(WorkerLost(f"worker {worker.label} sent what cannot be decoded: {error}"))
        except Exception as error:  # noqa: BLE001  the bindings raise ValueError, or Exception itself
            self.end(error_of(error, worker, has_handoff=self._ask.has_handoff))
        finally:
            self.end(None)

    async def _read(self) -> None:
        instance, ask = self._instance, self._ask
        direct = instance.client.direct
        stream = await direct(ask.body, instance.number, annotated=False, context=self._context)
        self._is_open = True
        if self._is_left:
            self._context.stop_generating()
        async for item in stream:
            instance.num_silent = 0
            self.num_prompt_tokens = 0
            await self._put(ask.take(item))
        await self._put(ask.end())

    async def _put(self, replies: Iterable[Reply]) -> None:
        for reply in replies:
            self._is_complete = isinstance(reply, TokenChunk) and reply.finish_reason is not None
            await self.replies.put(reply)


class Instance:
    """One instance of a worker, its running calls, and for how many ticks nothing came from it. A frozen
    worker keeps its registration and its connections, so a silent one gets a canary. A worker of Baton's is
    asked for its statistics, which its engine does not delay.
    """

    def __init__(self, client: "Client", number: int, worker: WorkerInfo, liveness_s: float) -> None:
        self.client = client
        self.number = number
        self.worker = worker
        self.is_own = worker.engine != FOREIGN
        self.calls: set[Call] = set()
        self._patience_s, self._canary_s = (liveness_s / 2,) * 2 if self.is_own else (liveness_s, CANARY_S)
        self.num_silent = 0
        self._canary: Call | None = None

    def ask(self, request: Request) -> Ask:
        """The request in this worker's form. Raises NotResumable, InvalidRequest."""
        if self.is_own:
            return own_ask(request)
        if not isinstance(request, GenerateRequest):
            raise InvalidRequest("Dynamo's workers answer requests for tokens only")
        return dynamo_ask(request, self.worker)

    def begin(self, ask: Ask) -> Call:
        """Start a call."""
        call = Call(self, ask)
        self.calls.add(call)
        call.task.add_done_callback(lambda _: self.calls.discard(call))
        return call

    async def probe(self) -> None:
        """Return once the worker answers a canary. Raises the canary's error."""
        await self._probing().replies.take()

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
            self._probing()

    def lose(self, reason: str, *, is_silent: bool = False) -> None:
        """End every call with WorkerLost."""
        for call in list(self.calls):
            error = WorkerLost(f"worker {self.worker.label} was lost: {reason}")
            error.is_silent = is_silent
            call.end(error)

    def _probing(self) -> Call:
        """The running canary, or a new one."""
        if self._canary is None or self._canary.task.done():
            self._canary = self.begin(own_ask(StatsRequest()) if self.is_own else canary(self.worker))
        return self._canary
