"""`python -m baton key NAME`: makes an API key, and its line for the frontend's --api-keys-file."""

import argparse
import secrets
import sys

from frontend.http.keys import line_of

_NUM_BYTES = 32


def key(argv: list[str]) -> int:
    """Print a new key on stderr, so that no file gets it, and its line on stdout. Exit status: 0, or 2 if the
    name is not allowed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m baton key", usage="python -m baton key NAME [--admin] >> API_KEYS_FILE"
    )
    parser.add_argument("name", metavar="NAME", help="the client's; keys with one name belong to one client")
    parser.add_argument(
        "--admin", action="store_true", help="may see the requests of all keys (`python -m baton why`)"
    )
    settings = parser.parse_args(argv)
    name = settings.name
    made = f"sk-baton-{secrets.token_urlsafe(_NUM_BYTES)}"
    try:
        line = line_of(name, made, is_admin=settings.admin)
    except ValueError as error:
        parser.error(str(error))
    sys.stderr.write(f"the key of {name}, which is shown only here: {made}\n")
    sys.stdout.write(f"{line}\n")
    return 0
