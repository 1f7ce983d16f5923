"""Counts the parts of a JSON body before it is decoded: decoding many holds up running streams."""

from baton.errors import BatonError

MAX_PARTS = 1 << 16
"""Objects, arrays and fields of a body: to decode so many takes about 10 ms."""
MAX_ENTRIES = 1 << 19
"""Entries of all arrays and objects, such as token ids."""
_CHUNK_BYTES = 64 << 10


class TooManyParts(BatonError):
    """The body has more objects, arrays and fields than are decoded."""

    code = "too_many_parts"
    status = 400
    kind = "invalid_request_error"


def check_parts(raw: bytes) -> None:
    """Raises TooManyParts. Goes through the body in short steps, between which other threads run."""
    if len(raw) <= MAX_PARTS:
        return
    in_string, rest, num_parts, num_entries = 0, b"", 0, 0
    for start in range(0, len(raw), _CHUNK_BYTES):
        chunk = rest + raw[start : start + _CHUNK_BYTES]
        is_split = (len(chunk) - len(chunk.rstrip(b"\\"))) % 2  # an escape that ends in the next chunk
        rest = chunk[len(chunk) - is_split :]
        chunk = chunk[: len(chunk) - is_split].replace(b"\\\\", b"").replace(b'\\"', b"")
        between = chunk.split(b'"')
        outside = b"".join(between[in_string::2])
        in_string ^= (len(between) - 1) % 2
        num_parts += sum(map(outside.count, (b"{", b"[", b":")))
        num_entries += outside.count(b",")
        for num, most, what in (
            (num_parts, MAX_PARTS, "objects, arrays and fields"),
            (num_entries, MAX_ENTRIES, "entries of arrays and objects"),
        ):
            if num > most:
                raise TooManyParts(f"The JSON body has more than {most} {what}; send fewer.")
