"""Reads the secrets in the files of the flags: the seal's key, the API keys, the certificate of HTTPS."""

import dataclasses
import ssl
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from baton.reread import Reread
from baton.tls import server_context
from frontend.flags import FrontendSettings
from frontend.http.limits import Keys, read_keys
from frontend.turn.seal import Seal

MIN_KEY_BYTES = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Credentials:
    """The frontend's secrets. `keys` is None if everyone may send requests, `tls` if over plain HTTP."""

    seal: Seal
    keys: Reread[Keys] | None
    tls: Reread[ssl.SSLContext] | None

    @property
    def rereadable(self) -> Sequence[Reread[Any]]:
        """Files that are read again when they change."""
        return [file for file in (self.keys, self.tls) if file is not None]

    def context(self) -> ssl.SSLContext | None:
        """That of new connections."""
        return None if self.tls is None else self.tls.value


def read_credentials(settings: FrontendSettings) -> Credentials:
    """Raises ValueError, with the flag and why."""
    keys_path = settings.api_keys_file
    try:
        flag = "--seal-key-file"
        seal = Seal(_seal_key(settings.seal_key_file))
        flag = "--api-keys-file"
        keys = None if keys_path is None else Reread([keys_path], partial(read_keys, keys_path))
        flag = "--tls-cert-file"
        tls = _tls(settings)
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag}: {error}") from error
    return Credentials(seal=seal, keys=keys, tls=tls)


def _tls(settings: FrontendSettings) -> Reread[ssl.SSLContext] | None:
    cert, key, client_ca = settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file
    if cert is None or key is None:
        return None
    paths = [cert, key] if client_ca is None else [cert, key, client_ca]
    return Reread(paths, partial(_https, cert, key, client_ca))


def _https(cert: Path, key: Path, client_ca: Path | None) -> ssl.SSLContext:
    context = server_context(cert, key, client_ca)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _seal_key(path: Path | None) -> bytes | None:
    if path is None:
        return None
    key = path.read_bytes().strip()
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"{path} has {len(key)} bytes; it must have at least {MIN_KEY_BYTES}")
    return key
