"""Guesses and forms in real processes: a stream outlives its worker, token for token."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.answers import Stream
from tests.stack import Stack

DISK: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^sd[a-z]$"}, "full": {"type": "boolean"}},
    "required": ["name", "full"],
    "additionalProperties": False,
}
DISKS: dict[str, Any] = {"type": "array", "items": DISK, "minItems": 12, "maxItems": 12}


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, DISKS], ids=["free", "form"])
def test_streams_with_guesses_outlive_a_killed_worker_without_losing_a_token(
    form: dict[str, Any] | None, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"guided_json": form, "temperature": 1, "seed": 5} if form else {}
    with Stack(tmp_path) as stack:
        (plain,) = stack.serve("decode", engine="embedded")
        expected = Stream(stack, 400, **asked).read()
        plain.kill()
        killed, _ = [stack.worker("decode", "--speculate", "lookup", engine="embedded") for _ in range(2)]
        stack.wait_ready(0, 2)
        streams = [Stream(stack, 400, **asked).read(3) for _ in range(2)]  # round-robin: one on each

        killed.kill()

        assert [stream.read().text for stream in streams] == [expected.text] * 2
        assert all(stream.done and stream.error is None for stream in streams)
        assert 'baton_attempts_total{reason="worker_lost"}' in stack.get("/metrics").text
        if form:
            jsonschema.validate(json.loads(expected.text), form)
        else:
            assert stack.gauge("baton_worker_accepted_guesses_total") > 0
            assert stack.health()["instances"][0]["tokens_per_step"] > 1
