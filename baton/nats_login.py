"""How this process proves itself to NATS: Dynamo's variables for logins, and certificates."""

import os
import ssl
from pathlib import Path
from typing import Any

from baton.tls import CredentialError, client_context

_LOGIN = {"user": "NATS_AUTH_USERNAME", "password": "NATS_AUTH_PASSWORD", "token": "NATS_AUTH_TOKEN"}
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
    if (context := _context()) is not None:
        options["tls"] = context
    return options


def _context() -> ssl.SSLContext | None:
    """Trusts only the authority in NATS_AUTH_CA; None without one."""
    ca, cert, key = (Path(name) if (name := os.environ.get(each)) else None for each in (CA, CERT, KEY))
    if (cert is None) != (key is None):
        raise CredentialError(f"{CERT} and {KEY}: set both")
    if ca is None:
        if cert:
            raise CredentialError(f"{CERT}: needs {CA}, the authority of the server's certificate")
        return None
    try:
        return client_context(ca, cert, key)
    except ValueError as error:
        raise CredentialError(f"{CA}, {CERT}, {KEY}: {error}") from error
