"""Ids that no other answer has."""

import secrets


def new_id(prefix: str) -> str:
    """An id of a kind of thing, with 192 random bits: `resp`, `msg`, `rs`, `fc`, `fco`."""
    return f"{prefix}_{secrets.token_hex(24)}"


def new_call_id() -> str:
    """The id of a call, which its result names."""
    return f"call_{secrets.token_hex(16)}"
