"""Faults of what a process relies on: its registration, its disk, its clock."""

import base64
import json
import resource
import struct
import time
from pathlib import Path

import httpx

from baton.etcd import PREFIX
from baton.etcd_rpc import prefix_end
from tests.chaos.injector import Injector, require
from tests.chaos.scene import Scene
from tests.chaos.schedule import Targets
from tests.registry import etcd_api
from tests.stack import MODEL
from tests.waiting import PATIENCE_S, wait_for

_JUMP_S = 3600
_REWRITTEN = "registration=written"


class LoseLease(Injector):
    """A worker's registration disappears: its lease is revoked, or its file deleted."""

    def __init__(self, scene: Scene, targets: Targets) -> None:
        (name,) = targets
        self._scene = scene
        self._worker = scene.processes[name]
        self._id = scene.worker_id(name)
        self._num_written = 0
        self._is_gone = False

    def begin(self) -> None:
        self._num_written = self._worker.text().count(_REWRITTEN)
        if self._scene.brokers:
            self._revoke()
        else:
            (file,) = (path for path in self._folder().glob("*.json") if self._is_mine(path.read_text()))
            file.unlink()
            self._is_gone = not file.exists()

    def proof(self) -> str:
        require(self._is_gone, "the registration is still there")
        wait_for(lambda: self._worker.text().count(_REWRITTEN) > self._num_written)
        return "gone, and written again by its worker"

    def _folder(self) -> Path:
        return Path(self._scene.stack.environ["BATON_FILE_REGISTRY"])

    def _is_mine(self, card: str | bytes) -> bool:
        return bool(json.loads(card)["worker_id"] == self._id)

    def _revoke(self) -> None:
        url = self._scene.etcd_url()
        (mine,) = (entry for entry in _entries(url) if self._is_mine(base64.b64decode(entry["value"])))
        etcd_api(url, "lease/revoke", ID=mine["lease"])
        self._is_gone = all(entry.get("lease") != mine["lease"] for entry in _entries(url))


def _entries(url: str) -> list[dict[str, str]]:
    """All registrations in etcd, with their leases."""
    found = etcd_api(url, "kv/range", key=PREFIX, range_end=prefix_end(PREFIX))
    entries: list[dict[str, str]] = found.get("kvs", [])  # type: ignore[assignment]  # etcd's JSON
    return entries


class FillDisk:
    """The frontend can write no file, so that responses cannot be stored."""

    def __init__(self, scene: Scene, _: Targets) -> None:
        self._scene = scene
        self._pid = scene.processes["frontend"].popen.pid
        self._before = resource.prlimit(self._pid, resource.RLIMIT_FSIZE)

    def begin(self) -> None:
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, (0, self._before[1]))

    def proof(self) -> str:
        self._respond()  # the first whose writing fails
        answer = self._respond()
        require("store" in answer.headers.get("x-baton-ignored", ""), "a response was stored")
        found = httpx.get(f"{self._scene.stack.url}/v1/responses/{answer.json()['id']}")
        require(found.status_code == httpx.codes.OK, f"the response is lost: {found.text}")
        return "x-baton-ignored: store, and the response is found"

    def end(self) -> None:
        resource.prlimit(self._pid, resource.RLIMIT_FSIZE, self._before)

    def _respond(self) -> httpx.Response:
        body = {"model": MODEL, "input": "Hello there!", "max_output_tokens": 20}
        answer = httpx.post(f"{self._scene.stack.url}/v1/responses", json=body, timeout=PATIENCE_S)
        return answer.raise_for_status()


class JumpClock:
    """All Baton processes' wall clocks jump by an hour, and back."""

    def __init__(self, scene: Scene, targets: Targets) -> None:
        self._scene = scene
        self._by_s = _JUMP_S if targets == ("forwards",) else -_JUMP_S

    def begin(self) -> None:
        self._set(self._by_s)

    def proof(self) -> str:
        library = self._scene.stack.environ["LD_PRELOAD"]
        for process in self._scene.stack.processes:
            if process.popen.poll() is None and process.name not in ("etcd", "nats"):
                maps = Path(f"/proc/{process.popen.pid}/maps").read_text()
                require(library in maps, f"{process.name} has the real clock")
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        created_s = httpx.post(f"{self._scene.stack.url}/v1/completions", json=body).json()["created"]
        wrong_by_s = created_s - time.time()
        require(abs(wrong_by_s - self._by_s) < PATIENCE_S, f"the clock is wrong by {wrong_by_s:.0f} s")
        return f"an answer's `created` is wrong by {wrong_by_s:.0f} s"

    def end(self) -> None:
        self._set(0)

    def _set(self, seconds: int) -> None:
        with self._scene.clock_file().open("r+b") as file:  # which the processes have mapped
            file.write(struct.pack("=q", seconds))
