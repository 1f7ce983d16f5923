"""How this process proves itself to NATS: Dynamo's variables for logins, keys and JWTs, and certificates."""

import base64
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from baton.reread import Reread
from baton.tls import CredentialError, client_context, client_files

_LOGIN = {"user": "NATS_AUTH_USERNAME", "password": "NATS_AUTH_PASSWORD", "token": "NATS_AUTH_TOKEN"}
NKEY, CREDENTIALS_FILE = "NATS_AUTH_NKEY", "NATS_AUTH_CREDENTIALS_FILE"
CA, CERT, KEY = "NATS_AUTH_CA", "NATS_AUTH_CLIENT_CERT", "NATS_AUTH_CLIENT_KEY"


def nats_options() -> dict[str, Any]:
    """nats-py's options from the environment; they count before those in the URL. Raises CredentialError with
    the variable's name.
    """
    options: dict[str, Any] = {
        name: os.environ[variable] for name, variable in _LOGIN.items() if os.environ.get(variable)
    }
    if ("user" in options) != ("password" in options):
        raise CredentialError(f"{_LOGIN['user']} and {_LOGIN['password']}: set both")
    seed, file = os.environ.get(NKEY), os.environ.get(CREDENTIALS_FILE)
    if seed and file:
        raise CredentialError(f"{NKEY} and {CREDENTIALS_FILE}: set one of them")
    if seed:
        _key_pair(seed, NKEY)
        options["nkeys_seed_str"] = seed
    if file:
        options |= _callbacks(Path(file))
    if os.environ.get(CERT) and os.environ.get(KEY) and not os.environ.get(CA):
        raise CredentialError(f"{CERT}: needs {CA}, the authority of the server's certificate")
    files = client_files(CA, CERT, KEY)
    if files[0] is not None:  # trusts only that authority
        options["tls"] = client_context(*files)
    return options


def _callbacks(file: Path) -> dict[str, Any]:
    """Read the file again with each connection, since a JWT expires. What was read before stays in use while
    that fails: nats-py stops reconnecting if a callback raises. Its own reading of an incomplete file never
    ends.
    """
    try:
        login = Reread([file], partial(_read, file))
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialError(f"{CREDENTIALS_FILE}: {file} cannot be read: {error}") from error

    def jwt() -> bytes:
        return login.value[0].encode()

    return {
        "user_jwt_cb": jwt,
        "signature_cb": lambda nonce: base64.b64encode(login.value[1].sign(nonce.encode())),
    }


def _read(file: Path) -> tuple[str, Any]:
    """The JWT and the key pair, each below a line `BEGIN ...`. Raises OSError, UnicodeDecodeError,
    CredentialError.
    """
    text, parts = file.read_text(), []
    for name in ("NATS USER JWT", "USER NKEY SEED"):
        found = re.search(rf"-+BEGIN {name}-+\s+(\S+)\s+-+END", text)
        if found is None:
            raise CredentialError(f"{CREDENTIALS_FILE}: {file} has no part BEGIN {name}")
        parts.append(found[1])
    return parts[0], _key_pair(parts[1], CREDENTIALS_FILE)


def _key_pair(seed: str, variable: str) -> Any:
    try:
        import nkeys  # noqa: PLC0415  an extra
    except ImportError:
        raise CredentialError(f"{variable}: needs the package nkeys: pip install nkeys") from None
    if seed.startswith("SU"):
        try:
            return nkeys.from_seed(bytearray(seed.strip().encode()))
        except (nkeys.NkeysError, ValueError):
            pass  # the error below is without the seed
    raise CredentialError(f"{variable}: the seed is not that of a NATS user, SU...")
