"""Baton's frontend over Dynamo's runtime, with workers that are doubles."""

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.stack import MODEL, ROOT, Process, Stack
from tests.waiting import PATIENCE_S, scaled, wait_for

_TEMPLATE = (
    "{% for m in messages %}<|start|>{{m.role}}<|message|>{{m.content}}<|end|>{% endfor %}<|start|>assistant"
)


def templated_model(folder: Path) -> Path:
    """The demo model with a `chat_template`, without which Dynamo's processes do not start; it renders no
    tools of Harmony's.
    """
    model = folder / "model"
    if not model.exists():
        shutil.copytree(ROOT / "models/demo", model)
        path = model / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": _TEMPLATE}))
    return model


class DynamoStack(Stack):
    """The registry is a folder and the plane TCP unless `environ` says otherwise."""

    def __init__(self, folder: Path, environ: dict[str, str] | None = None) -> None:
        ours = {
            "BATON_REQUEST_PLANE": "dynamo",
            "BATON_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(folder / "kv"),
            "DYN_TCP_RPC_HOST": "127.0.0.1",
            "DYN_LOG": "error",
            "DYN_SELF_HOST_METADATA": "0",
            "BATON_LIVENESS_S": str(scaled(2.0)),
        }
        super().__init__(folder, ours | (environ or {}))
        del self.environ["BATON_FILE_REGISTRY"]

    def double(self, role: str, *flags: str) -> Process:
        """A double of that role; see `tests.dynamo_double`."""
        name = f"{role}-{len(self.processes)}"
        return self.start(name, "tests.dynamo_double", role, str(self.folder), *flags)

    def start_fleet(self, *roles: str, flags: tuple[str, ...] = ()) -> list[Process]:
        """A frontend and doubles, ready: the doubles."""
        self.frontend()
        doubles = [self.double(role, *flags) for role in roles]
        self.wait_ready(roles.count("prefill"), len(roles) - roles.count("prefill"))
        return doubles

    @property
    def num_pins(self) -> int:
        """KV that prefill holds."""
        return sum(1 for _ in (self.folder / "pins").iterdir())


@dataclass
class Streamed:
    """A stream as a client read it: its text, how it ended, the longest time without an event, and its
    number of tokens if the client asked for the usage.
    """

    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    gap_s: float = 0.0
    num_tokens: int = 0


def stream(stack: Stack, prompt: str, read: Streamed | None = None, **body: Any) -> Streamed:
    """Read a streamed completion to its end, into `read`."""
    read = Streamed() if read is None else read
    body = {"model": MODEL, "prompt": prompt, "stream": True, "temperature": 0} | body
    with httpx.stream(
        "POST", f"{stack.url}/v1/completions", json=body, timeout=PATIENCE_S, verify=False
    ) as answer:
        since_s = time.monotonic()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            now_s = time.monotonic()
            read.gap_s, since_s = max(read.gap_s, now_s - since_s), now_s
            event = json.loads(line[6:])
            if "error" in event:
                read.error = event["error"]["code"]
            read.num_tokens = (event.get("usage") or {}).get("completion_tokens", 0)
            for choice in event.get("choices", ()):
                read.text += choice["text"]
                read.finish_reason = choice.get("finish_reason") or read.finish_reason
    return read


def under_streams(
    stack: Stack, num: int, disturb: Callable[[], object] | None, **body: Any
) -> list[Streamed]:
    """So many streams, all of them begun when `disturb` is called, compared with undisturbed ones: the texts
    must be equal."""
    prompts = [f"Story {i}" for i in range(num)]
    with ThreadPoolExecutor(num) as pool:
        undisturbed = list(pool.map(lambda prompt: stream(stack, prompt, **body).text, prompts))
        reads = [Streamed() for _ in prompts]
        running = [
            pool.submit(stream, stack, prompt, read, **body)
            for prompt, read in zip(prompts, reads, strict=True)
        ]
        wait_for(lambda: all(read.text for read in reads))
        if disturb is not None:
            assert not all(read.finish_reason for read in reads), "too late: every stream has ended"
            disturb()
        for each in running:
            each.result(PATIENCE_S)
    assert [read.text for read in reads] == undisturbed
    assert {(read.finish_reason, read.error) for read in reads} == {("length", None)}
    return reads
