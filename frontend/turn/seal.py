"""Thoughts that clients carry: sealed, or signed, so that only what this server wrote is taken back."""

import base64
import binascii
import hashlib
import hmac
import secrets
import zlib

# Of what claims to be ours: an epoch of the format, then the key's own name.
_OURS = "bt1"
_MAX_BYTES = 4 << 20


class Changed(Exception):
    """What carries this server's name is not what it wrote."""


class Seal:
    """Signs with a key that all frontends of one service share; without one, with a key of this process.

    A signature is `bt1.KEY-NAME.MAC`. What another key or another server made is not ours: it is left out,
    since sessions move between servers; what says that it is ours and is not was changed.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key or secrets.token_bytes(32)
        self._prefix = f"{_OURS}.{hashlib.sha256(b'name' + self._key).hexdigest()[:8]}."

    def sign(self, text: str) -> str:
        """A signature of the text."""
        return self._prefix + self._mac(text.encode())

    def is_ours(self, text: str, signature: str) -> bool:
        """Whether we signed anything like this. Raises Changed if it was another text."""
        if not signature.startswith(self._prefix):
            return False
        if not hmac.compare_digest(signature.removeprefix(self._prefix), self._mac(text.encode())):
            raise Changed
        return True

    def close(self, text: str) -> str:
        """The text in one opaque word, which `open` takes."""
        data = base64.urlsafe_b64encode(zlib.compress(text.encode(errors="surrogatepass"))).decode()
        return f"{self._prefix}{self._mac(data.encode())}.{data}"

    def open(self, sealed: str) -> str | None:
        """The text, or None if another server closed it. Raises Changed."""
        if not sealed.startswith(self._prefix):
            return None
        mac, _, data = sealed.removeprefix(self._prefix).partition(".")
        if not hmac.compare_digest(mac, self._mac(data.encode())):
            raise Changed
        try:
            inflate = zlib.decompressobj()
            text = inflate.decompress(base64.urlsafe_b64decode(data), _MAX_BYTES)
        except (binascii.Error, zlib.error) as error:
            raise Changed from error
        return text.decode(errors="surrogatepass")

    def _mac(self, data: bytes) -> str:
        return hmac.new(self._key, data, hashlib.sha256).hexdigest()[:32]
