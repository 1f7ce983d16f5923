"""Runs a launch script with its own port and run folder; reads its output and stops it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.conftest import free_port
from tests.image import Image
from tests.stack import MODEL, ROOT
from tests.waiting import PATIENCE_S

_MOCKER_YAML = "engine_configs/demo/mocker.yaml"
MOCKER = {
    "ENGINE": "mocker",
    "MODEL_PATH": "models/demo",
    "SERVED_MODEL_NAME": MODEL,
    "PREFILL_ENGINE_ARGS": _MOCKER_YAML,
    "DECODE_ENGINE_ARGS": _MOCKER_YAML,
    "ENGINE_ARGS": _MOCKER_YAML,
    "PREFILL_FLAGS": "",
    "DECODE_FLAGS": "",
    "FLAGS": "",
}
# TensorRT-LLM's double with the demo model; flags and YAML are the scripts' own.
DOUBLE = {
    "ENGINE": "trtllm",
    "MODEL_PATH": "models/demo",
    "PYTHONPATH": str(ROOT / "tests/doubles"),
    "SKIP_DOCTOR": "1",
}


def _take_ctrl_c() -> None:
    """Restore SIGINT: background processes inherit it ignored, which bash cannot trap."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Launch:
    """One run of a script in launch/, with the mocker by default; here, or in an image."""

    def __init__(
        self,
        run_dir: Path,
        *arguments: str,
        script: str = "local.sh",
        engine: Mapping[str, str] = MOCKER,
        image: Image | None = None,
        **environ: str,
    ) -> None:
        self.port = int(environ.get("HTTP_PORT", free_port()))
        self.run_dir = run_dir
        here = {k: v for k, v in os.environ.items() if not k.startswith(("BATON_", "ETCD_", "NATS_"))}
        inherited = image.environ if image else here | {"PYTHON": sys.executable}
        folder = image.workdir if image else ROOT
        own = {"HTTP_PORT": str(self.port), "RUN_DIR": str(run_dir)}
        self.popen = subprocess.Popen(
            [str(folder / "launch" / script), *arguments],
            env=inherited | own | dict(engine) | environ,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=_take_ctrl_c,  # noqa: PLW1509  before any thread
            text=True,
        )

    def read_until(self, wanted: str) -> str:
        """The output up to a line that contains `wanted`, or all of it."""
        assert self.popen.stdout is not None
        text = ""
        for line in self.popen.stdout:
            text += line
            if wanted in line:
                break
        return text

    def end(self) -> tuple[int, str]:
        """(exit status, output) after it has ended."""
        output, _ = self.popen.communicate(timeout=PATIENCE_S)
        return self.popen.returncode, output

    def stop(self) -> None:
        """End it, if it runs."""
        self.popen.terminate()
        self.popen.communicate(timeout=PATIENCE_S)

    def pid_of(self, words: str) -> int:
        """The process whose command line has these words."""
        return next(pid for pid, command in self.processes().items() if words in command)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def processes(self) -> dict[int, str]:
        """Command lines of this run's processes by pid, found by the inherited RUN_DIR."""
        found = {}
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"RUN_DIR={self.run_dir}\0".encode() in environ.read_bytes():
                    command = (environ.parent / "cmdline").read_text().replace("\0", " ")
                    found[int(environ.parent.name)] = command
            except (PermissionError, ProcessLookupError, FileNotFoundError):
                continue
        return found


Run = Callable[..., Launch]
"""`run("SCRIPT ARGUMENTS", ENGINE, VARIABLE=value...)`"""
