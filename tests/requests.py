"""Requests for tokens, as short as a test needs them."""

from collections.abc import Iterable
from typing import Any

from baton.messages import GenerateRequest, Sampling
from tests.waiting import PATIENCE_S


def token_request(token_ids: Iterable[int], **options: Any) -> GenerateRequest:
    """`options` are fields of the request or of its sampling."""
    fields = {name: options.pop(name) for name in options.keys() & set(GenerateRequest.__struct_fields__)}
    sampling = Sampling(**{"max_tokens": 12, "seed": 0} | options)
    outer: dict[str, Any] = {"request_id": "r", "model": "m", "deadline_s": PATIENCE_S, "sampling": sampling}
    return GenerateRequest(token_ids=list(token_ids), **outer | fields)
