"""A rate that simultaneous work shares, as an engine's prompts share its GPU."""

import asyncio


class SharedRate:
    """Work is done in turn, each piece at the whole rate."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._turn = asyncio.Lock()
        self._free_s = 0.0  # when the piece in work ends

    async def work(self, amount: float) -> None:
        """Return when this much is done, after the pieces before it; a cancelled piece takes no more time."""
        now_s = asyncio.get_running_loop().time
        is_busy = self._turn.locked()
        async with self._turn:
            # The next piece starts when the one before it ends, not when a late timer says so.
            began_s = min(self._free_s, now_s()) if is_busy else now_s()
            self._free_s = began_s + amount / self._per_s
            await asyncio.sleep(self._free_s - now_s())
