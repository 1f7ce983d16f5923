"""`python -m baton download` against a small hub on loopback: excludes, resume, checksums, refusals."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import errors

from baton.model_folder import model_folder
from operations.commands import main
from operations.download import DownloadError, _check_room, _check_sums, _explained
from tests.waiting import PATIENCE_S

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "openai/gpt-oss-tiny"
WEIGHTS = bytes(range(256)) * 98_304  # 24 MiB: the hub library keeps what has come in pieces of 10
FILES = {
    "config.json": b'{"model_type": "gpt_oss"}',
    "model.safetensors": WEIGHTS,
    "original/model.bin": b"x" * 5000,
    "metal/model.bin": b"x" * 5000,
}
LARGE = "model.safetensors"


class Hub(ThreadingHTTPServer):
    """As much of the hub as a download touches. `status` refuses all, `cut_bytes` ends one answer early."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.sizes: dict[str, int] = {}
        self.status = 200
        self.error_code = ""
        self.cut_bytes: int | None = None
        self.served: list[tuple[str, str | None]] = []
        self.revisions: list[str] = []
        self.sums = {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if self.server.status != 200:
            self._send(b"{}", status=self.server.status, headers={"X-Error-Code": self.server.error_code})
        elif path.startswith(f"/api/models/{REPO}/tree/{COMMIT}"):
            self._send(json.dumps([self._entry(name) for name in FILES]).encode())
        elif path.startswith(f"/api/models/{REPO}"):
            self.server.revisions.append(path.rpartition("/")[2])
            self._send(json.dumps({"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": []}).encode())
        elif path.startswith(f"/{REPO}/resolve/{COMMIT}/"):
            self._file(path.split("/", 5)[5])
        else:
            self._send(b"{}", status=404, headers={"X-Error-Code": "RepoNotFound"})

    def _entry(self, name: str) -> dict[str, object]:
        data = FILES[name]
        size = self.server.sizes.get(name, len(data))
        entry: dict[str, object] = {"type": "file", "path": name, "size": size, "oid": _git_hash(data)}
        if name == LARGE:
            entry["lfs"] = {"oid": self.server.sums[name], "size": size, "pointerSize": 134}
        return entry

    def _file(self, name: str) -> None:
        data, wanted = FILES[name], self.headers.get("Range")
        etag = self.server.sums[name] if name == LARGE else _git_hash(FILES[name])
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if name == LARGE:
            headers |= {
                "X-Linked-Etag": f'"{etag}"',
                "X-Linked-Size": str(self.server.sizes.get(name, len(data))),
            }
        status = 200
        if self.command == "GET":
            self.server.served.append((name, wanted))
        if wanted and self.command == "GET":
            first = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {first}-{len(data) - 1}/{len(data)}"
            data, status = data[first:], 206
        self._send(data, status=status, headers=headers)

    def _send(self, body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.server.cut_bytes is not None and len(body) > self.server.cut_bytes and self.command == "GET":
            body, self.server.cut_bytes, self.close_connection = body[: self.server.cut_bytes], None, True
        if self.command == "GET":
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _download(url: str, folder: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    settings = {"HF_ENDPOINT": url, "HF_HOME": str(folder.parent / "hf"), "NO_PROXY": "127.0.0.1"}
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    command = [sys.executable, "-m", "baton", "download", *(arguments or (REPO, "--local-dir", str(folder)))]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=clean | settings | environ,
    )


def test_the_guides_command_gets_the_model_without_the_other_formats_and_once(
    hub: Hub, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    command = (REPO, "--exclude", "original/*", "--exclude", "metal/*", "--local-dir", str(folder))
    done = _download(hub.url, folder, *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder}: 2 files of {REPO} at {COMMIT}\n"
    assert (folder / LARGE).read_bytes() == WEIGHTS
    assert {name for name, _ in hub.served} == {"config.json", LARGE}
    assert hub.revisions.count("main") == 1  # it may move meanwhile
    hub.served.clear()
    assert _download(hub.url, folder).returncode == 0
    assert hub.served == []


def test_each_flag_counts(hub: Hub, tmp_path: Path) -> None:
    hub.sums[LARGE] = "0" * 64
    flags = ("--exclude", "*.json", "--revision", "v2", "--skip-checksums")
    done = _download(hub.url, tmp_path / "model", REPO, *flags, MODEL_PATH=str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    assert {name for name, _ in hub.served} == {LARGE}
    assert "v2" in hub.revisions


def test_a_connection_that_ends_early_is_taken_up_where_it_ended(hub: Hub, tmp_path: Path) -> None:
    hub.cut_bytes = 15_000_000
    done = _download(hub.url, tmp_path / "model")
    assert done.returncode == 0, done.stderr
    assert [wanted for name, wanted in hub.served if name == LARGE] == [None, "bytes=10485760-"]
    assert (tmp_path / "model" / LARGE).read_bytes() == WEIGHTS


def test_a_file_that_was_changed_is_named(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    hub.sums[LARGE] = "0" * 64
    done = _download(hub.url, folder)
    assert done.returncode == 1
    assert f"rm -f {folder}/{LARGE}, then run this again" in done.stderr


def test_too_little_room_is_an_error_before_a_byte_is_fetched(hub: Hub, tmp_path: Path) -> None:
    hub.sizes[LARGE] = 1 << 60
    done = _download(hub.url, tmp_path / "model")
    assert done.returncode == 1
    assert "GiB free; make room" in done.stderr
    assert "cannot be reached" not in done.stderr
    assert hub.served == []


def test_what_an_earlier_try_fetched_needs_no_room_again(tmp_path: Path) -> None:
    free_bytes = shutil.disk_usage(tmp_path).free
    file: Any = SimpleNamespace(file_size=free_bytes + free_bytes // 2, will_download=True)
    with pytest.raises(DownloadError, match="make room"):
        _check_room([file], tmp_path)
    fetched = tmp_path / ".cache" / "huggingface" / "download" / "x.incomplete"
    fetched.parent.mkdir(parents=True)
    fetched.touch()
    os.truncate(fetched, free_bytes)  # without using the disk
    _check_room([file], tmp_path)
    fetched.unlink()
    file.will_download = False
    _check_room([file], tmp_path)


def test_the_models_own_files_are_verified_and_no_others(tmp_path: Path) -> None:
    verdict = SimpleNamespace(mismatches=[{"path": "metal/model.bin"}], missing_paths=["original/model.bin"])
    _check_sums(verdict, {LARGE}, REPO, tmp_path)
    verdict.missing_paths.append(LARGE)
    with pytest.raises(DownloadError, match=f"rm -f {tmp_path}/{LARGE}, then"):
        _check_sums(verdict, {LARGE}, REPO, tmp_path)


def test_a_refusal_is_one_line_with_what_to_do(hub: Hub, tmp_path: Path) -> None:
    hub.status, hub.error_code = 401, "RepoNotFound"
    done = _download(hub.url, tmp_path / "model")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "is private or not on" in done.stderr


def _response(status: int) -> Any:
    return SimpleNamespace(status_code=status, headers={}, request=None, text="", url="")


EXPLAINED: list[tuple[Exception, str]] = [
    (OSError(errno.ENOSPC, "No space left on device"), "the disk of /m is full"),
    (PermissionError(errno.EACCES, "Permission denied"), "/m is not writable"),
    (OSError(errno.ENETUNREACH, "Network is unreachable"), "([Errno 101] Network is unreachable); check"),
    (errors.HFValidationError("a/b/c"), "is not a repository name"),
    (errors.OfflineModeIsEnabled(), "HF_HUB_OFFLINE is set"),
    (ValueError("first\nsecond"), "http://hub cannot be reached (first); check the network"),
    (ValueError(), "http://hub cannot be reached (ValueError)"),
    (errors.HfHubHTTPError("", response=_response(429)), "http://hub: too many requests"),
    (errors.HfHubHTTPError("", response=_response(401)), "http://hub: the token is refused (HTTP 401)"),
    (errors.HfHubHTTPError("", response=_response(503)), "http://hub: answers HTTP 503; run the same"),
    (errors.GatedRepoError("", response=_response(403)), "requires consent"),
    (errors.RevisionNotFoundError("", response=_response(404)), "no such revision"),
    (errors.RepositoryNotFoundError("", response=_response(404)), "is private or not on http://hub"),
]


@pytest.mark.parametrize(("error", "advice"), EXPLAINED)
def test_each_failure_has_its_advice(error: Exception, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://hub")
    assert advice in _explained(error, REPO, Path("/m"))


def test_without_network_a_half_filled_folder_is_not_taken_for_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes(b"{}")
    done = _download("http://127.0.0.1:1", folder)
    assert done.returncode == 1
    assert "http://127.0.0.1:1 cannot be reached" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_download_that_is_stopped_or_lacks_its_library_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    line = ["download", REPO, "--local-dir", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr("operations.download._fetch", interrupted)
        assert main(line) == 130
    assert capsys.readouterr().err == "stopped\n"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert main(line) == 2
    assert "pip install '.[download]'" in capsys.readouterr().err


def test_without_a_folder_it_goes_where_a_worker_finds_it_by_its_id(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    done = _download(hub.url, tmp_path / "model", REPO, MODEL_PATH=REPO)
    assert done.returncode == 0, done.stderr
    folder = model_folder(Path(REPO))
    assert done.stdout == f"{folder}: 2 files of {REPO} at {COMMIT}\n"
    assert (folder / LARGE).read_bytes() == WEIGHTS
    hub.sums[LARGE] = "0" * 64
    done = _download(hub.url, tmp_path / "model", REPO, MODEL_PATH="")
    assert done.returncode == 1
    assert f"rm -f {(folder / LARGE).resolve()}, then run this again" in done.stderr


def test_without_a_name_the_usage_is_shown(hub: Hub, tmp_path: Path) -> None:
    assert _download(hub.url, tmp_path / "model", "--local-dir", "x").returncode == 2
