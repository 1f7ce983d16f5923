"""Doctor reads this machine, as its files, variables and tools tell it, and waits for no tool that hangs."""

import os
import sys
from pathlib import Path

import pytest

from baton.flags import parse
from operations.doctor import command, plan, probes
from operations.doctor.command import DoctorSettings, gather
from operations.doctor.plan import ask_worker

FILES = {
    "/proc/meminfo": "MemTotal:       1000 kB\nMemFree:         200 kB\nMemAvailable:    600 kB\n",
    "/proc/sys/kernel/yama/ptrace_scope": "2\n",
}


@pytest.mark.parametrize(("capabilities", "can_ptrace"), [("80000", True), ("7ffff", False), ("1", False)])
def test_memory_and_tracing_are_those_of_proc(
    capabilities: str, can_ptrace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FILES | {"/proc/self/status": f"Name:\tpython\nCapEff:\t{capabilities:0>16}\n"}
    monkeypatch.setattr(probes, "_text", files.__getitem__)
    host = probes.probe_host()
    assert (host.memory_bytes, host.memory_free_bytes) == (1000 * 1024, 600 * 1024)
    assert (host.ptrace_scope, host.can_ptrace) == (2, can_ptrace)


def test_only_what_concerns_workers_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SECRET", "x")
    ours = {"BATON_PEER_CERT": "/x", "HTTPS_PROXY": "http://p", "UCX_TLS": "tcp", "NCCL_DEBUG": "INFO"}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    host = probes.probe_host()
    assert ours.items() <= host.environment.items()
    assert "SOME_SECRET" not in host.environment


def script(folder: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that PATH has first."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_an_nvidia_smi_that_hangs_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "TIMEOUT_S", 0.05)
    script(tmp_path, "nvidia-smi", "exec sleep 60", monkeypatch)
    assert (probes.probe_gpus().problem or "").startswith("nvidia-smi hangs")


def test_a_worker_that_does_not_tell_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "python", "exec sleep 60", monkeypatch)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(plan, "_TIMEOUT_S", 0.05)
    assert "takes longer than" in (ask_worker([]) or "")


# socket.create_server leaves its socket to the collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("host", "port"),
    [("127.0.0.1", 99_999), ("127.0.0.1", -1), ("\udcff", 0)],
    ids=["high", "low", "no text"],
)
def test_an_address_that_is_none_cannot_be_listened_on(host: str, port: int) -> None:
    assert probes.bind_problem(host, port)


def gathered(*arguments: str, **environ: str) -> tuple[bool, ...]:
    """Whether --host, the frontend's address, the registry and the credentials have a problem."""
    line = ["--http-port", "0", "--model-path", "models/none", *arguments]
    facts = gather(parse(DoctorSettings, line, prog="p", description="d", environ=environ).settings)
    problems = (
        facts.host_problem,
        facts.http_port_problem,
        facts.registry_problem,
        facts.credential_problem,
    )
    return tuple(problem is not None for problem in problems)


def test_each_address_folder_and_login_is_checked_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no tools to ask
    monkeypatch.setattr(command, "with_refusals", pytest.fail)  # without a model a worker tells nothing new
    own = ("--file-registry", str(tmp_path / "own"))
    assert gathered(*own) == (False, False, False, False)
    assert gathered(*own, "--host", "192.0.2.1") == (True, False, False, False)
    assert gathered(*own, "--http-host", "192.0.2.1") == (False, True, False, False)
    anyones = tmp_path / "anyones"
    anyones.mkdir(mode=0o777)
    anyones.chmod(0o777)
    assert gathered("--file-registry", str(anyones)) == (False, False, True, False)
    monkeypatch.setenv("BATON_PEER_CERT", str(tmp_path / "none"))
    assert gathered(*own) == (False, False, False, True)


def test_the_services_in_use_are_asked_at_each_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # as above
    closed = "http://127.0.0.1:9, http://127.0.0.1:10/"
    line = ["--model-path", "models/none", "--discovery-backend", "etcd", "--etcd-endpoints", closed]
    facts = gather(parse(DoctorSettings, line, prog="p", description="d", environ={}).settings)
    assert [(s.name, s.url) for s in facts.services] == [
        ("etcd", "http://127.0.0.1:9"),
        ("etcd", "http://127.0.0.1:10"),
    ]
    line = ["--model-path", "models/none", "--file-registry", str(tmp_path / "own")]
    line += ["--request-plane", "nats", "--nats-server", "nats://127.0.0.1:9,nats://127.0.0.1:10"]
    facts = gather(parse(DoctorSettings, line, prog="p", description="d", environ={}).settings)
    assert [(s.name, s.url) for s in facts.services] == [
        ("NATS", "nats://127.0.0.1:9"),
        ("NATS", "nats://127.0.0.1:10"),
    ]
