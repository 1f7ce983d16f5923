"""Certificates for 127.0.0.1, from an authority of the test's own."""

import shutil
import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

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

    def sign(self, name: str) -> Certificate:
        """A new certificate and its key."""
        self._openssl("req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (self._folder / "extensions").write_text(
            "subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\nbasicConstraints=CA:FALSE\n"
        )
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "1")
        self._openssl(
            "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing, "-extfile", "extensions"
        )
        return Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")

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
