"""Which files of the frontend's secrets are read, and read again when they change."""

from pathlib import Path

import pytest

from frontend.flags import FrontendSettings, read_credentials
from frontend.http.keys import line_of
from tests.certificates import Authority


def test_without_files_there_is_nothing_to_read_again() -> None:
    credentials = read_credentials(FrontendSettings())
    assert list(credentials.rereadable) == []
    assert credentials.context() is None


def test_keys_certificates_and_client_authorities_that_change_are_in_use_after_a_check(
    tmp_path: Path,
) -> None:
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
    for each in credentials.rereadable:
        each.check()

    assert list(credentials.keys.value.values()) == ["robert"]
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
    assert read_credentials(settings).seal.open(sealed) == "thought"
