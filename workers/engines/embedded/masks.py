"""Token masks of guided answers: requested early, waited for briefly."""

import asyncio
from collections.abc import Callable

from workers.engines.embedded.scheduler import Phase, Sequence

_PATIENCE_S = 0.01


class Masks:
    """Requests each answer's next mask as soon as its last token is known; runs on the event loop.

    A step waits at most `_PATIENCE_S` for masks, most of which take 0.1 ms. An answer whose mask is late
    skips steps until it arrives, without delaying others again. `on_change` is called for each arrival: the
    sequence may run now, or its matcher failed.
    """

    def __init__(self, on_change: Callable[[Sequence], None]) -> None:
        self._on_change = on_change
        self._due: dict[Sequence, bool] = {}  # whether a step should wait for it
        self._none_due = asyncio.Event()

    def ask(self, sequence: Sequence) -> None:
        """Request the mask for the sequence's next token, if it is guided."""
        matcher = sequence.matcher
        if matcher is None or sequence.phase in (Phase.DONE, Phase.PINNED):
            return
        if sequence.pulls_kv and sequence.phase is not Phase.RUNNING:
            return  # its next token comes with the KV
        matcher.ask(sequence.token_ids, sequence.num_prompt)
        if not matcher.is_ready:
            self._due[sequence] = sequence.phase is Phase.RUNNING
            asyncio.get_running_loop().add_reader(matcher.fileno(), self._receive, sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop an ended sequence. Idempotent."""
        self._settle(sequence)
        if sequence.matcher is not None:
            sequence.matcher.close()

    async def moment(self) -> None:
        """Wait briefly for the masks of running answers."""
        if not any(self._due.values()):
            return
        self._none_due.clear()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._none_due.wait()
        except TimeoutError:
            self._due = dict.fromkeys(self._due, False)

    def _receive(self, sequence: Sequence) -> None:
        assert sequence.matcher is not None
        self._settle(sequence)
        sequence.matcher.receive()
        self._on_change(sequence)

    def _settle(self, sequence: Sequence) -> None:
        if self._due.pop(sequence, None) is not None:
            assert sequence.matcher is not None
            asyncio.get_running_loop().remove_reader(sequence.matcher.fileno())
        if not any(self._due.values()):
            self._none_due.set()
