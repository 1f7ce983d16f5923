"""Baton's frontend over Dynamo's runtime, with workers that are doubles."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from tests.answers import Stream
from tests.stack import ROOT, Process, Stack
from tests.waiting import PATIENCE_S, scaled, wait_for

_TEMPLATE = (
    "{% for m in messages %}<|start|>{{m.role}}<|message|>{{m.content}}<|end|>{% endfor %}<|start|>assistant"
)


def templated_model(folder: Path) -> Path:
    """The demo model with a `chat_template`, without which Dynamo's processes do not start; it renders no
    tools of Harmony's."""
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


def disturbed(begin: Callable[[str], Stream], num: int, disturb: Callable[[], object] | None) -> list[Stream]:
    """Streams, one a prompt; all have begun when `disturb` is called, and each must be complete."""
    with ThreadPoolExecutor(num) as pool:
        streams = list(pool.map(begin, (f"Story {i}" for i in range(num))))
        running = [pool.submit(stream.read) for stream in streams]
        wait_for(lambda: all(stream.text for stream in streams))
        if disturb is not None:
            assert not all(stream.finish_reason for stream in streams), "too late: every stream has ended"
            disturb()
        for each in running:
            each.result(PATIENCE_S)
    assert [(stream.finish_reason, stream.error) for stream in streams] == [("length", None)] * num
    return streams


def under_streams(
    stack: Stack, num: int, disturb: Callable[[], object] | None, max_tokens: int, **body: Any
) -> list[Stream]:
    """So many streams, disturbed; their texts must be those of undisturbed ones."""
    begin = partial(Stream, stack, max_tokens, **body)
    undisturbed, streams = (disturbed(begin, num, each) for each in (None, disturb))
    assert [stream.text for stream in streams] == [stream.text for stream in undisturbed]
    return streams
