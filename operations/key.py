"""`python -m baton key NAME`: makes an API key, and its line for the frontend's --api-keys-file."""

import dataclasses
import secrets
import sys

from baton.flags import flag, parse
from frontend.http.limits import line_of

_NUM_BYTES = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeySettings:
    """Flags of `python -m baton key NAME`."""

    requests_per_minute: int | None = flag(None, "limit of requests", metavar="N")
    tokens_per_minute: int | None = flag(None, "limit of prompt and answer tokens", metavar="N")


def key(argv: list[str]) -> int:
    """Print a new key on stderr, so that no file gets it, and its line on stdout. Exit status: 0, or 2 if the
    name is not allowed.
    """
    name, argv = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else ("", argv)
    settings = parse(
        KeySettings, argv, prog="python -m baton key NAME", description="A new API key."
    ).settings
    if not name:
        sys.stderr.write("usage: python -m baton key NAME >> API_KEYS_FILE\n")
        return 2
    made = f"sk-baton-{secrets.token_urlsafe(_NUM_BYTES)}"
    try:
        line = line_of(name, made, requests=settings.requests_per_minute, tokens=settings.tokens_per_minute)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stderr.write(f"the key of {name}, which is shown only here: {made}\n")
    sys.stdout.write(f"{line}\n")
    return 0
