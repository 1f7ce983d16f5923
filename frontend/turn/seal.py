"""Signs the reasoning that clients carry, so that only this service's unchanged reasoning is accepted."""

import base64
import hashlib
import hmac
import secrets
import zlib

from baton.errors import InvalidRequest

# Format version: a signature is `bt1.FINGERPRINT.MAC`, with a fingerprint of the key.
_OURS = "bt1"
_MAX_BYTES = 4 << 20


class Seal:
    """Signs with a key shared by all frontends of a service, or with a random key of this process. Content of
    another key or server is left out rather than refused, since sessions move between servers."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(32)
        self._prefix = f"{_OURS}.{hashlib.sha256(b'name' + self._key).hexdigest()[:8]}."

    def sign(self, text: str) -> str:
        return self._prefix + self._mac(text.encode())

    def is_ours(self, text: str, signature: str, path: str) -> bool:
        """Whether the signature is of this key. Raises InvalidRequest, naming the field `path`, if it does
        not match the text."""
        if not signature.startswith(self._prefix):
            return False
        mac = signature.removeprefix(self._prefix)
        if not hmac.compare_digest(mac.encode(), self._mac(text.encode()).encode()):  # as texts only ASCII
            raise _changed(path)
        return True

    def close(self, text: str) -> str:
        """The text as an opaque signed string, which `open` reads."""
        data = base64.urlsafe_b64encode(zlib.compress(text.encode())).decode()
        return f"{self.sign(data)}.{data}"

    def open(self, sealed: str, path: str) -> str | None:
        """The text of the field `path`, or None if it was sealed with another key. Raises InvalidRequest."""
        if not sealed.startswith(self._prefix):
            return None
        signature, _, data = sealed.rpartition(".")
        try:
            if not self.is_ours(data, signature, path):
                raise _changed(path)
            inflate = zlib.decompressobj()
            return inflate.decompress(base64.urlsafe_b64decode(data), _MAX_BYTES).decode()
        except (ValueError, zlib.error) as error:  # `sign` was given it as a text
            raise _changed(path) from error

    def _mac(self, data: bytes) -> str:
        return hmac.new(self._key, data, hashlib.sha256).hexdigest()[:32]


def _changed(path: str) -> InvalidRequest:
    return InvalidRequest.at(
        path, "does not match the reasoning; send both back unchanged, or leave them out."
    )
