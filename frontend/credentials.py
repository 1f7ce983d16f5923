"""Reads what the flags' files hold that others must not know or change: the seal's key and the API keys."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from frontend.flags import FrontendSettings
from frontend.http.keys import Keys, read_keys
from frontend.http.reread import Reread
from frontend.turn.seal import Seal

MIN_KEY_BYTES = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Credentials:
    """The frontend's secrets; `keys` is None if everyone may send requests."""

    seal: Seal
    keys: Reread[Keys] | None

    @property
    def rereadable(self) -> Sequence[Reread[Any]]:
        """Files that are read again when they change."""
        return [] if self.keys is None else [self.keys]


def read_credentials(settings: FrontendSettings) -> Credentials:
    """Raises ValueError, with the flag and why."""
    keys_path = settings.api_keys_file
    try:
        flag = "--seal-key-file"
        seal = Seal(_seal_key(settings.seal_key_file))
        flag = "--api-keys-file"
        keys = None if keys_path is None else Reread([keys_path], partial(read_keys, keys_path))
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag}: {error}") from error
    return Credentials(seal=seal, keys=keys)


def _seal_key(path: Path | None) -> bytes | None:
    if path is None:
        return None
    key = path.read_bytes().strip()
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"{path} has {len(key)} bytes; it must have at least {MIN_KEY_BYTES}")
    return key
