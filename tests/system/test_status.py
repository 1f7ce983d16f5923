"""`python -m baton status` asks its own frontend, whatever proxy variables say."""

import os
import socket
import subprocess
import sys

from tests.waiting import PATIENCE_S

ANSWER = b'HTTP/1.0 200 OK\r\n\r\n{"status": "healthy", "instances": [], "missing": []}'
CLOSED_PORT = "http://127.0.0.1:9"


def test_status_asks_no_proxy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frontend:
        frontend.settimeout(30)
        url = f"http://127.0.0.1:{frontend.getsockname()[1]}"
        command = [sys.executable, "-m", "baton", "status", "--url", url]
        environment = os.environ | {"http_proxy": CLOSED_PORT, "HTTP_PROXY": CLOSED_PORT, "no_proxy": ""}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as asking:
            connection, _ = frontend.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(ANSWER)
            said, _ = asking.communicate(timeout=PATIENCE_S)

    assert (asking.returncode, said) == (0, "healthy: 0 prefill, 0 decode\n")
