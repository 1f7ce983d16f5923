"""Certificates for 127.0.0.1, from an authority of the test's own."""

import os
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from baton.peer_tls import CA, CERT, KEY, PeerTls

SHARED = "BATON_TESTS_AUTHORITY"
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Certificate(NamedTuple):
    cert: Path
    key: Path


class Authority:
    """`ca` is its certificate; its files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.fail("openssl is not on the PATH: apt-get install openssl")
        self._folder = folder
        self.ca = folder / "ca.pem"
        folder.mkdir(exist_ok=True)
        self._openssl(
            "req", "-x509", *_KEY, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "1"
        )

    def sign(self, name: str, *, days: int = 1, extension: str = "") -> Certificate:
        """A new certificate and its key. With 0 `days` it has expired."""
        self._openssl("req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (self._folder / "extensions").write_text(
            f"subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\nbasicConstraints=CA:FALSE\n{extension}\n"
        )
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", str(days))
        self._openssl(
            "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing, "-extfile", "extensions"
        )
        return Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")

    def peer(self, name: str = "peer") -> PeerTls:
        """TLS of a process with a new certificate."""
        return PeerTls(*self.sign(name), self.ca)

    def environ(self, name: str, **options: Any) -> dict[str, str]:
        """The same, as the variables of a process; `options` of `sign`."""
        cert, key = self.sign(name, **options)
        return {CERT: str(cert), KEY: str(key), CA: str(self.ca)}

    def client(self, own: Certificate | None = None) -> ssl.SSLContext:
        """The context of a client that trusts this authority, with a certificate of its own or without."""
        context = ssl.create_default_context(cafile=self.ca)
        if own is not None:
            context.load_cert_chain(own.cert, own.key)
        return context

    def encrypt(self, key: Path) -> None:
        """Put a password on a key."""
        self._openssl("ec", "-in", str(key), "-out", str(key), "-aes256", "-passout", "pass:secret")

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._folder, check=True, capture_output=True)


def shared_peer() -> PeerTls:
    """That of every process of the test session, which the fixture `shared_authority` has made."""
    folder = Path(os.environ[SHARED])
    return PeerTls(folder / "peer.pem", folder / "peer.key", folder / "ca.pem")
