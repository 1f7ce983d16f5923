"""A frontend whose stderr is a pipe that nobody reads."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx

from tests.conftest import free_port
from tests.waiting import PATIENCE_S, scaled, wait_for

NUM_REQUESTS = 200
F_SETPIPE_SZ = 1031


def test_it_answers_and_ends_all_the_same(tmp_path: Path) -> None:
    port = free_port()
    environ = {
        **os.environ,
        "BATON_DISCOVERY_BACKEND": "file",
        "BATON_REQUEST_PLANE": "tcp",
        "BATON_FILE_REGISTRY": str(tmp_path / "registry"),
        "BATON_RESPONSE_STORE": ":memory:",
    }
    command = [sys.executable, "-m", "frontend", "--http-port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environ) as frontend:
        assert frontend.stderr is not None
        fcntl.fcntl(frontend.stderr, F_SETPIPE_SZ, 4096)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
                wait_for(lambda: is_live(client), PATIENCE_S)
                for _ in range(NUM_REQUESTS):  # each makes a line
                    assert client.post("/v1/completions", json={}).status_code == 400
                assert "baton_lost_log_lines_total 0.0" in client.get("/metrics").text
            frontend.send_signal(signal.SIGTERM)
            assert frontend.wait(scaled(30)) == 0
        finally:
            frontend.kill()


def is_live(client: httpx.Client) -> bool:
    try:
        return client.get("/live").status_code == 200
    except httpx.TransportError:
        return False
