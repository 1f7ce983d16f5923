"""`python -m baton key NAME`: makes an API key, and its line for the frontend's --api-keys-file."""

import dataclasses
import secrets
import sys

from baton.flags import Parsed, flag
from frontend.http.keys import line_of
from operations.errors import CommandError


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeySettings:
    """Flags of `python -m baton key NAME`."""

    name: str = flag("", "of the client, which may have several", metavar="NAME", is_positional=True)
    admin: bool = flag(False, "it may see the requests of all keys: python -m baton why")


def key(parsed: Parsed[KeySettings]) -> int:
    """Print a new key on stderr, so that no file gets it, and its line on stdout: python -m baton key NAME >>
    FILE. Raises CommandError if the name is not allowed."""
    settings = parsed.settings
    made = f"sk-baton-{secrets.token_urlsafe(32)}"
    try:
        line = line_of(settings.name, made, is_admin=settings.admin)
    except ValueError as error:
        raise CommandError(str(error)) from error
    sys.stderr.write(f"API key for {settings.name} (shown once, store it now): {made}\n")
    sys.stdout.write(f"{line}\n")
    return 0
