"""Signs the reasoning that clients carry, so that only this service's unchanged reasoning is accepted."""

import hashlib
import hmac
import secrets

from baton.errors import InvalidRequest

_SEALED = "bt2 "  # earlier releases take such a text for another server's


class Seal:
    """Signs with a key shared by all frontends of a service, or with a random key of this process. Content of
    another key or server is left out rather than refused, since sessions move between servers."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(32)
        # Format version and a fingerprint of the key, before the MAC.
        self._prefix = f"bt1.{hashlib.sha256(b'name' + self._key).hexdigest()[:8]}."

    def sign(self, text: str) -> str:
        mac = hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()
        return self._prefix + mac[:32]

    def is_ours(self, text: str, signature: str, path: str) -> bool:
        """Whether the signature is of this key. Raises InvalidRequest, naming the field `path`, if it does
        not match the text."""
        if not signature.startswith(self._prefix):
            return False
        if not hmac.compare_digest(signature.encode(), self.sign(text).encode()):  # as texts only ASCII
            what = "does not match the reasoning; send both back unchanged, or leave them out."
            raise InvalidRequest.at(path, what)
        return True

    def close(self, text: str) -> str:
        """The text and its signature as one string, which `open` reads."""
        return f"{_SEALED}{self.sign(text)} {text}"

    def open(self, sealed: str, path: str) -> str | None:
        """The text of the field `path`, or None if this key did not seal it. Raises InvalidRequest."""
        signature, space, text = sealed.removeprefix(_SEALED).partition(" ")
        return text if space and self.is_ours(text, signature, path) else None
