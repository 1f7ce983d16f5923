"""`python -m baton key NAME`: makes an API key, and its line for the frontend's --api-keys-file."""

import dataclasses
import secrets
import sys

from baton.flags import flag, parse
from frontend.http.keys import line_of

_NUM_BYTES = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeySettings:
    """Flags of `python -m baton key NAME`."""

    name: str = flag(
        "", "the client's; keys with one name are one client's", metavar="NAME", is_positional=True
    )
    admin: bool = flag(False, "it may see the requests of all keys: python -m baton why")


def key(argv: list[str]) -> int:
    """Print a new key on stderr, so that no file gets it, and its line on stdout. Exit status: 0, or 2 if the
    name is not allowed.
    """
    settings = parse(
        KeySettings,
        argv,
        prog="python -m baton key NAME",
        description="A new API key. Append its line to the keys file: python -m baton key NAME >> FILE",
    ).settings
    made = f"sk-baton-{secrets.token_urlsafe(_NUM_BYTES)}"
    try:
        line = line_of(settings.name, made, is_admin=settings.admin)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stderr.write(f"API key for {settings.name} (shown once, store it now): {made}\n")
    sys.stdout.write(f"{line}\n")
    return 0
