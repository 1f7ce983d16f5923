"""The mocker's settings."""

import dataclasses
import math
from pathlib import Path

from workers.settings import require


@dataclasses.dataclass(frozen=True, kw_only=True)
class MockerSettings:
    """The timing model. Prompts share `prefill_tokens_per_s`, first come, first served. A decode step takes
    `decode_step_ms` plus up to `jitter_ms`, for any batch size.
    The KV of the last `max_cached_tokens` is found again, in blocks of 16 tokens.
    `script` is a file of answers to play; see `workers.engines.script`. `prompt_log` is a file to which the
    token ids of each prompt are appended, one JSON line each. While the file `hang_while` exists, the engine
    hangs: its worker only sends heartbeats. `prefill_sends_first`: prefill's first token need not wait for
    the KV to move, as with vLLM.
    """

    prefill_tokens_per_s: float = 50_000.0
    decode_step_ms: float = 10.0
    jitter_ms: float = 0.0
    kv_transfer_ms: float = 1.0
    handoff_ttl_s: float = 60.0
    max_batch_size: int = 1024
    max_queue_size: int = 4096
    max_seq_len: int = 131_072
    max_cached_tokens: int = 1_000_000
    seed: int = 0
    script: str | None = None
    prompt_log: str | None = None
    hang_while: str | None = None
    prefill_sends_first: bool = False

    def __post_init__(self) -> None:
        for key in ("prefill_tokens_per_s", "handoff_ttl_s"):
            value = getattr(self, key)
            require(0 < value < math.inf, key, value, "a finite number above 0")
        for key in ("decode_step_ms", "jitter_ms", "kv_transfer_ms"):
            value = getattr(self, key)
            require(0 <= value < math.inf, key, value, "a finite number, 0 or more")
        for key, least in (("max_batch_size", 1), ("max_seq_len", 2)):
            require(getattr(self, key) >= least, key, getattr(self, key), f"at least {least}")
        for key in ("max_queue_size", "max_cached_tokens"):
            require(getattr(self, key) >= 0, key, getattr(self, key), "0 or more")

    @property
    def is_hung(self) -> bool:
        """Whether the engine hangs now."""
        return self.hang_while is not None and Path(self.hang_while).exists()
