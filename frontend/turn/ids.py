"""Unique ids of responses, items and calls."""

import secrets


def new_id(prefix: str) -> str:
    """An id with 192 random bits; prefixes are `resp`, `msg`, `rs`, `fc`, `fco`..."""
    return f"{prefix}_{secrets.token_hex(24)}"


def new_call_id() -> str:
    """The id of a tool call, which its result refers to."""
    return f"call_{secrets.token_hex(16)}"
