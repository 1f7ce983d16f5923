"""Calls to one worker of Dynamo's, and whether it responds."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import msgspec

from baton.dynamo.bodies import CANARY, Decoded, Prefilled, dynamo_request, error_of
from baton.dynamo.cards import FOREIGN
from baton.dynamo.messages import DynamoChunk, DynamoRequest
from baton.dynamo.replies import Replies
from baton.errors import BatonError, DeadlineExceeded, WorkerLost
from baton.messages import UNDECODABLE, GenerateRequest, Reply, WorkerInfo
from baton.pace import TICK_S

if TYPE_CHECKING:
    from dynamo.runtime import Client

CANARY_S = 7.0
"""How long a canary may be unanswered; longer by the length of the longest prompt that waits, since the
engine may compute that first."""
_TOKENS_PER_S = 4000
_STOP_S = 5.0
Reader = Prefilled | Decoded
_numbers = itertools.count()


class Call:
    """One running call. A task of its own reads the binding's stream, since callers advance a generator from
    several tasks. Dynamo's runtime refuses two calls with the same id at a time. `reader` makes replies of
    chunks; without one, any chunk will do.
    """

    def __init__(
        self, instance: "Instance", body: DynamoRequest, reader: Reader | None, name: str, limit_s: float
    ) -> None:
        from dynamo.runtime import Context  # noqa: PLC0415  of an extra

        self.num_prompt_tokens = 0 if body.prefill_result is not None else len(body.token_ids)
        self._context = Context(f"{name}.{next(_numbers)}")
        self._instance = instance
        self._body = body
        self._reader = reader
        self._replies = Replies()
        self._is_open = self._is_left = self._is_complete = False
        self.task = asyncio.get_running_loop().create_task(self._run(limit_s))

    def replies(self) -> AsyncGenerator[Reply, None]:
        """The replies. Raises the BatonError that ends the call."""
        return self._replies.read()

    def end(self, error: BatonError | None) -> None:
        """No more replies follow; the worker is asked to stop."""
        self._replies.end(error)
        self.leave()

    def leave(self) -> None:
        """Stop the worker's work, which ends the stream at once; but not before the worker has the request,
        for which KV may be held.
        """
        if not self._is_left and not self.task.done():
            self._is_left = True
            self._replies.leave()
            if self._is_open and not self._is_complete:
                self._context.stop_generating()
            stop = asyncio.get_running_loop().call_later(_STOP_S, self.task.cancel)
            self.task.add_done_callback(lambda _: stop.cancel())

    async def _run(self, limit_s: float) -> None:
        has_handoff = self._body.prefill_result is not None
        try:
            async with asyncio.timeout(limit_s):
                await self._read()
            for reply in self._reader.end() if self._reader else ():
                await self._replies.put(reply)
        except TimeoutError:
            self.end(DeadlineExceeded())
        except BatonError as error:
            self.end(error)
        except UNDECODABLE as error:
            self.end(WorkerLost(f"worker {self._instance.worker.label} sent no chunk of Dynamo's: {error}"))
        except Exception as error:  # noqa: BLE001  the bindings raise ValueError, or Exception itself
            self.end(error_of(error, self._instance.worker, has_handoff=has_handoff))
        finally:
            self.end(None)

    async def _read(self) -> None:
        instance, reader, convert = self._instance, self._reader, msgspec.convert
        body = msgspec.to_builtins(self._body)
        stream = await instance.client.direct(body, instance.number, annotated=False, context=self._context)
        self._is_open = True
        if self._is_left:
            self._context.stop_generating()
        async for item in stream:
            instance.note_life()
            self.num_prompt_tokens = 0
            chunk = convert(item, DynamoChunk)
            self._is_complete = chunk.finish_reason is not None
            reply = reader.take(chunk) if reader else None
            if reply is not None:
                await self._replies.put(reply)


class Instance:
    """One instance of a worker, its running calls, and for how many ticks nothing came from it. A frozen
    worker keeps its registration and its connections, so a silent one gets a canary.
    """

    def __init__(self, client: "Client", number: int, worker: WorkerInfo, liveness_s: float) -> None:
        self.client = client
        self.number = number
        self.worker = worker
        self.calls: set[Call] = set()
        self._num_patient = round(liveness_s / TICK_S)
        self._num_silent = 0
        self._canary: Call | None = None
        self._life: asyncio.Future[None] | None = None

    def body(self, request: GenerateRequest) -> DynamoRequest:
        """The request for this worker. Raises NotResumable, InvalidRequest."""
        return dynamo_request(request, self.worker.role, is_own=self.worker.engine != FOREIGN)

    def begin(self, body: DynamoRequest, reader: Reader | None, name: str, limit_s: float) -> Call:
        """Start a call."""
        call = Call(self, body, reader, name, limit_s)
        self.calls.add(call)
        call.task.add_done_callback(lambda _: self.calls.discard(call))
        return call

    @property
    def num_requests(self) -> int:
        """The running calls, without a canary."""
        return sum(call is not self._canary for call in self.calls)

    def note_life(self) -> None:
        """Something came from the worker."""
        self._num_silent = 0
        if self._life is not None:
            life, self._life = self._life, None
            life.set_result(None)

    async def probe(self) -> None:
        """Return once something comes from the worker. Raises the canary's error."""
        canary = self._ask()
        life = self._life = self._life or asyncio.get_running_loop().create_future()
        await asyncio.wait([life, canary.task], return_when=asyncio.FIRST_COMPLETED)
        if not life.done():
            async for _ in canary.replies():
                pass

    def tick(self) -> None:
        """Ask a worker that is silent; end its calls if it does not answer that."""
        if not self.calls:
            self._num_silent = 0
            return
        self._num_silent += 1
        longest = max(call.num_prompt_tokens for call in self.calls)
        if self._num_silent >= self._num_patient + round((CANARY_S + longest / _TOKENS_PER_S) / TICK_S):
            self.lose("it does not respond", is_silent=True)
        elif self._num_silent >= self._num_patient:
            self._ask()

    def lose(self, reason: str, *, is_silent: bool = False) -> None:
        """End every call with WorkerLost."""
        for call in list(self.calls):
            error = WorkerLost(f"worker {self.worker.label} was lost: {reason}")
            error.is_silent = is_silent
            call.end(error)

    def _ask(self) -> Call:
        """The running canary, or a new one."""
        if self._canary is None or self._canary.task.done():
            body = msgspec.structs.replace(CANARY, model=self.worker.model)
            self._canary = self.begin(body, None, "canary", 10 * CANARY_S)
        return self._canary
