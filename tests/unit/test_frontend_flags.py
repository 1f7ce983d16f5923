"""What the frontend refuses before it serves: flags, and the files of secrets that they name."""

from pathlib import Path
from typing import Any

import pytest

from baton.flags import read
from frontend.__main__ import main
from frontend.flags import FrontendSettings, read_credentials
from frontend.http.keys import line_of
from tests.certificates import Authority
from tests.waiting import wait_for


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("--local-prefill-after-s", "-0.5", "at least 0"),
        ("--max-wait-s", "nan", "a finite number of at most 1e.15"),
        ("--request-timeout-s", "0", "above 0"),
        ("--http-port", "65536", "at least 0 and at most 65535"),
        ("--num-processes", "0", "at least 1 and at most 64"),
    ],
)
def test_numbers_out_of_range_are_refused_by_their_flag(flag: str, value: str, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"^{flag} {value}: must be {allowed}$"):
        read(FrontendSettings, [f"{flag}={value}"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_host", "a.example, http://b.example"),
        ("allowed_host", "a.example:8000"),
        *(("cors_origin", value) for value in ("foo", "https://a.b/", "https://*.b", "*, HTTP://b")),
        ("model_alias", "gpt-9"),
        *(("otlp_endpoint", value) for value in ("localhost:4317", "http://", "grpc://a:4317", "http:///v1")),
        *(("current_date", value) for value in ("20260101", "2026-1-1", "today")),
    ],
)
def test_other_bad_values_are_refused_by_their_flag(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"^--{field.replace('_', '-')} .*: must be "):
        FrontendSettings(**{field: value})  # type: ignore[arg-type]  # all are texts


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--tls-cert-file", "c"], "--tls-cert-file and --tls-key-file: give both"),
        (["--tls-key-file", "k"], "--tls-cert-file and --tls-key-file: give both"),
        (["--tls-client-ca-file", "a"], "--tls-client-ca-file: needs --tls-cert-file and --tls-key-file"),
        (["--tls-cert-file", "no", "--tls-key-file", "k"], "--tls-cert-file: no and k are not a certificate"),
        *((["--http-host", at.strip("[]")], f"other machines can reach {at}:") for at in ("0.0.0.0", "[::]")),
        (["--http-host", ""], "other machines can reach :0"),
    ],
)
def test_flags_that_do_not_fit_end_the_start(
    flags: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: Any = main([f"--file-registry={tmp_path / 'registry'}", "--http-port", "0", *flags])
    except SystemExit as end:  # of the flags' own checks
        status = end.code
    assert status == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: {why}")


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
    assert (str(path) in error, "Errno" in error) == (True, False)


def test_keys_certificates_and_client_authorities_that_change_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.reread.EVERY_S", 0.01)
    authority, other = Authority(tmp_path / "one"), Authority(tmp_path / "other")
    cert, key = authority.sign("server")
    keys = tmp_path / "keys"
    keys.write_text(line_of("alice", "a"))
    keys.chmod(0o600)
    credentials = read_credentials(
        FrontendSettings(
            api_keys_file=keys, tls_cert_file=cert, tls_key_file=key, tls_client_ca_file=authority.ca
        )
    )
    assert credentials.keys is not None
    first = credentials.context()
    assert first is not None
    [trusted] = first.get_ca_certs(binary_form=True)

    keys.write_text(line_of("robert", "b"))
    authority.ca.write_bytes(other.ca.read_bytes())

    changed = credentials.keys
    wait_for(lambda: [key.name for key in changed.value.values()] == ["robert"])
    wait_for(lambda: credentials.context() is not first)
    second = credentials.context()
    assert second is not None
    assert second.get_ca_certs(binary_form=True) != [trusted]


@pytest.mark.parametrize("num_bytes", [31, 32])
def test_a_seal_key_has_enough_bytes_without_the_space_around_it(num_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"\n" + b"k" * num_bytes + b"\n")
    settings = FrontendSettings(seal_key_file=path)
    if num_bytes < 32:
        with pytest.raises(ValueError, match=f"^--seal-key-file: {path} has {num_bytes} bytes"):
            read_credentials(settings)
        return
    sealed = read_credentials(settings).seal.close("thought")
    path.write_bytes(b"k" * num_bytes)
    assert read_credentials(settings).seal.open(sealed, "x") == "thought"
