"""How this process proves itself to NATS: Dynamo's variables for logins, and certificates."""

import os
import ssl
from typing import Any

_LOGIN = {"user": "NATS_AUTH_USERNAME", "password": "NATS_AUTH_PASSWORD", "token": "NATS_AUTH_TOKEN"}
CA, CERT, KEY = "NATS_AUTH_CA", "NATS_AUTH_CLIENT_CERT", "NATS_AUTH_CLIENT_KEY"


class LoginError(ValueError):
    """A login or a certificate is missing or cannot be read; the message names the variable."""


def nats_options() -> dict[str, Any]:
    """nats-py's options from the environment; they count before those in the URL. Raises LoginError with the
    variable's name.
    """
    options: dict[str, Any] = {
        name: os.environ[variable] for name, variable in _LOGIN.items() if os.environ.get(variable)
    }
    if ("user" in options) != ("password" in options):
        raise LoginError(f"{_LOGIN['user']} and {_LOGIN['password']}: set both")
    if (context := _context()) is not None:
        options["tls"] = context
    return options


def _context() -> ssl.SSLContext | None:
    """Trusts only the authority in NATS_AUTH_CA; None without one."""
    ca, cert, key = (os.environ.get(name) or None for name in (CA, CERT, KEY))
    if (cert is None) != (key is None):
        raise LoginError(f"{CERT} and {KEY}: set both")
    if not ca:
        if cert:
            raise LoginError(f"{CERT}: needs {CA}, the authority of the server's certificate")
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise LoginError(f"{CA}={ca}: {error.strerror or error}") from error
    if cert and key:
        try:
            context.load_cert_chain(cert, key, password="")  # an encrypted key would ask at the terminal
        except OSError as error:
            raise LoginError(f"{CERT}={cert}, {KEY}={key}: {error.strerror or error}") from error
    return context
