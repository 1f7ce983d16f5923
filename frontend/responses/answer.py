"""The answer of the Responses API: its lifecycle from created to the terminal event, and its storage."""

import time
from collections.abc import Sequence

import msgspec

from baton.errors import BatonError
from baton.messages import TokenChunk
from frontend.harmony.conversation import Delta
from frontend.http.answer import Answer
from frontend.responses.body import (
    RUNNING,
    IncompleteDetails,
    InputDetails,
    OutputDetails,
    ResponseError,
    ResponseObject,
    ResponseUsage,
)
from frontend.responses.items import Item
from frontend.responses.output import EventWriter, OutputWriter
from frontend.responses.store import ResponseStore, StoredResponse
from frontend.turn.choice import Choice

# Longer streams are not stored and cannot be resumed; their responses are stored all the same.
MAX_KEPT_STREAM_BYTES = 16 << 20


class ResponseAnswer(Answer):
    """An answer that stores its events. It belongs to the key `key_name`."""

    def __init__(
        self,
        response: ResponseObject,
        items: Sequence[Item],
        choice: Choice,
        *,
        output: OutputWriter,
        writer: EventWriter | None,
        store: ResponseStore,
        key_name: str = "",
        ignored: tuple[str, ...] = (),
    ) -> None:
        self.model = choice.request.model
        self.stream = writer is not None
        self.ignored = ignored
        self.response = response
        self.key_name = key_name
        self.choice = choice
        self.choices = [choice]
        self._items = items
        self._output = output
        self._writer = writer
        self._store = store
        self._kept: list[bytes] | None = [] if self.stream and response.store else None
        self._num_kept_bytes = 0
        self._opening = b""
        if writer is not None:
            created = writer.event("response.created", response=response)
            self._opening = self._keep(created + writer.event("response.in_progress", response=response))

    @property
    def kept_stream(self) -> bytes | None:
        """All events so far; None if they are not stored or exceed the limit."""
        return None if self._kept is None else b"".join(self._kept)

    @property
    def num_events(self) -> int:
        """Events so far."""
        return 0 if self._writer is None else self._writer.num_events

    def opening(self) -> bytes:
        """`response.created` and `response.in_progress`."""
        return self._opening

    def feed(self, index: int, chunk: TokenChunk) -> bytes:  # noqa: ARG002  there is one choice
        """The events of a chunk."""
        return self._keep(self._output.write(self.choice.feed(chunk)))

    def finish(self, index: int) -> bytes:  # noqa: ARG002  there is one choice
        """The choice's last events; `closing` ends the response."""
        return self.write(self.choice.finish())

    def write(self, deltas: Sequence[Delta]) -> bytes:
        """The events of these deltas."""
        return self._keep(self._output.write(deltas))

    def closing(self) -> bytes:
        """The event that ends a completed or incomplete response."""
        if self.choice.is_cut:
            self.response.status = "incomplete"
            self.response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        else:
            self.response.status = "completed"
            self.response.completed_at = int(time.time())
        return self._end()

    def failure(self, error: BatonError) -> bytes:
        """The event that ends a failed response."""
        self._output.interrupt()
        self.response.status = "failed"
        self.response.error = ResponseError.of(error)
        return self._end()

    def cancelled(self) -> bytes:
        """The event that ends a cancelled response: OpenAI defines no event for it, so it is
        `response.incomplete` with status `cancelled`."""
        self._output.interrupt()
        self.response.status = "cancelled"
        return self._end()

    def body(self) -> ResponseObject:
        """The response so far."""
        self._output.fill()
        self.response.output = self._output.items
        return self.response

    async def settle(self) -> None:
        """End and store the response."""
        if self.response.status == RUNNING:
            self.closing()
        await self.save()

    async def save(self) -> None:
        """Store the response so far, unless `store` is false."""
        if not self.response.store:
            return
        body = self.body()
        kept = StoredResponse(
            id=body.id,
            status=body.status,
            body=msgspec.json.encode(body),
            items=msgspec.json.encode(self._items),
            previous_id=body.previous_response_id,
            is_background=body.background,
            events=self.kept_stream,
            key_name=self.key_name,
        )
        await self._store.save(kept, [item.id for item in (*self._items, *body.output)])

    def _end(self) -> bytes:
        self.response.usage = self._usage()
        response = self.body()
        if self._writer is None:
            return b""
        status = "incomplete" if response.status == "cancelled" else response.status
        return self._keep(self._writer.event(f"response.{status}", response=response))

    def _keep(self, data: bytes) -> bytes:
        if self._kept is not None and data:
            self._kept.append(data)
            self._num_kept_bytes += len(data)
            if self._num_kept_bytes > MAX_KEPT_STREAM_BYTES:
                self._kept = None
        return data

    def _usage(self) -> ResponseUsage:
        received, num_prompt_tokens = self.choice.received, len(self.choice.request.token_ids)
        return ResponseUsage(
            input_tokens=num_prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=received.num_cached_tokens),
            output_tokens=received.num_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=self.choice.num_reasoning_tokens),
            total_tokens=num_prompt_tokens + received.num_tokens,
        )
