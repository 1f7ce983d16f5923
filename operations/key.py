"""`python -m baton key NAME`: makes an API key, and its line for the frontend's --api-keys-file."""

import dataclasses
import secrets
import sys

from baton.flags import flag, parse
from frontend.http.keys import line_of

_NUM_BYTES = 32
_PROG = "python -m baton key"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeySettings:
    """Flags of `python -m baton key NAME`."""

    admin: bool = flag(False, "it may see the requests of all keys: python -m baton why")


def key(argv: list[str]) -> int:
    """Print a new key on stderr, so that no file gets it, and its line on stdout. Exit status: 0, or 2 if the
    name is not allowed.
    """
    names = [each for each in argv if not each.startswith("-")]
    settings = parse(
        KeySettings,
        [each for each in argv if each.startswith("-")],
        prog=f"{_PROG} NAME",
        description="A new API key. Append its line to the keys file: python -m baton key NAME >> FILE",
    ).settings
    made = f"sk-baton-{secrets.token_urlsafe(_NUM_BYTES)}"
    try:
        (name,) = names or [""]
        line = line_of(name, made, is_admin=settings.admin)
    except ValueError as error:
        why = error if len(names) == 1 else f"give one name: {_PROG} NAME [--admin] >> API_KEYS_FILE"
        sys.stderr.write(f"error: {why}\n")
        return 2
    sys.stderr.write(f"API key for {name} (shown once, store it now): {made}\n")
    sys.stdout.write(f"{line}\n")
    return 0
