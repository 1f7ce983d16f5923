"""What the frontend refuses before it serves."""

from pathlib import Path

import pytest

from frontend.__main__ import main


@pytest.mark.parametrize(
    ("flag", "content"),
    [
        *(("--seal-key-file", content) for content in (None, "short", " " * 40)),
        *(("--api-keys-file", content) for content in (None, "alice sk-a-key", "")),
    ],
)
def test_a_file_of_secrets_that_cannot_be_used_ends_the_start(
    flag: str, content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "secrets"
    if content is not None:
        path.write_text(content)
        path.chmod(0o666)
    assert main(["--http-port", "0", f"--file-registry={tmp_path / 'registry'}", flag, str(path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {flag}: ")
    assert str(path) in error


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
def test_other_machines_are_not_served_without_keys(
    host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--http-host", host, "--http-port", "0", f"--file-registry={tmp_path / 'registry'}"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: other machines can reach {host}:0, and there are no API keys: give ")
    assert "--api-keys-file" in said
    assert "--insecure" in said


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--tls-cert-file", "c"], "--tls-cert-file and --tls-key-file: give both"),
        (["--tls-key-file", "k"], "--tls-cert-file and --tls-key-file: give both"),
        (["--tls-client-ca-file", "a"], "--tls-client-ca-file: needs --tls-cert-file and --tls-key-file"),
        (
            ["--tls-cert-file", "no", "--tls-key-file", "k"],
            "--tls-cert-file: no and k are not a certificate and",
        ),
    ],
)
def test_tls_flags_that_do_not_fit_end_the_start(
    flags: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main([f"--file-registry={tmp_path / 'registry'}", "--http-port", "0", *flags])
    except SystemExit as end:  # of the flags' own checks
        status = end.code  # type: ignore[assignment]  # it is a number
    assert status == 2
    assert f"error: {why}" in capsys.readouterr().err.splitlines()[-1]
