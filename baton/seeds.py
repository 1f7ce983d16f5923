"""Seeds for engines without positional sampling."""

from baton.messages import Sampling

_SEED_BITS = (1 << 63) - 1
# Odd numbers of high entropy (golden ratio, square root of 3) keep the seeds of choices and attempts apart.
_CHOICE_STEP = 0x1E3779B97F4A7C15
_RESUME_STEP = 0x3504F333F9DE6485


def seed_of_attempt(sampling: Sampling, num_generated: int) -> int:
    """A 63-bit seed for an engine without positional sampling: the request's own seed for the first attempt
    at the first choice.
    """
    return (sampling.seed + sampling.choice * _CHOICE_STEP + num_generated * _RESUME_STEP) & _SEED_BITS
