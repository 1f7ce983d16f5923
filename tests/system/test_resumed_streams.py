"""A frontend dies: its clients go on where they stopped, at another frontend."""

import json
from pathlib import Path
from typing import Any

import httpx

from tests.stack import MODEL, Stack
from tests.waiting import PATIENCE_S

NUM_TOKENS = 120


def read(url: str, key: str, after: str = "", num_events: int | None = None) -> tuple[list[Any], str]:
    """The data of the stream's next events, and the last one's id; sampled, without a seed."""
    body = {"model": MODEL, "prompt": "one two", "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}
    headers = {"idempotency-key": key} | ({"last-event-id": after} if after else {})
    datas, last_id = [], after
    with (
        httpx.Client(timeout=PATIENCE_S, verify=False) as client,
        client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                datas.append(json.loads(line.removeprefix("data: ")))
            elif line.startswith("id: "):
                last_id = line.removeprefix("id: ")
                if len(datas) == num_events:
                    break
    return datas, last_id


def text_of(datas: list[Any]) -> str:
    return "".join(choice["text"] for data in datas for choice in data["choices"])


def test_a_client_of_a_killed_frontend_goes_on_at_another(stack: Stack, tmp_path: Path) -> None:
    whole, _ = read(stack.url, "a key")
    dying, url = stack.another_frontend("--response-store", str(tmp_path / "other.sqlite3"))
    begun, last_id = read(url, "a key", num_events=len(whole) // 3)
    dying.kill()

    rest, _ = read(stack.url, "a key", last_id)

    assert len(begun) == len(whole) // 3
    assert [data["id"] for data in begun + rest] == [data["id"] for data in whole]
    assert text_of(begun + rest) == text_of(whole)
    assert text_of(read(stack.url, "another key")[0]) != text_of(whole)
    stack.wait_idle()
