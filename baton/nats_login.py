"""How this process proves itself to NATS: Dynamo's variables for logins and certificates."""

import os
from typing import Any

from baton.tls import CredentialError, client_context, client_files

_LOGIN = {"user": "NATS_AUTH_USERNAME", "password": "NATS_AUTH_PASSWORD", "token": "NATS_AUTH_TOKEN"}
_NOT_SERVED = ("NATS_AUTH_NKEY", "NATS_AUTH_CREDENTIALS_FILE")
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
    for variable in _NOT_SERVED:
        if os.environ.get(variable):
            raise CredentialError(f"{variable}: not supported; use {', '.join(_LOGIN.values())}, {CERT}")
    if os.environ.get(CERT) and os.environ.get(KEY) and not os.environ.get(CA):
        raise CredentialError(f"{CERT}: needs {CA}, the authority of the server's certificate")
    files = client_files(CA, CERT, KEY)
    if files[0] is not None:  # trusts only that authority
        options["tls"] = client_context(*files)
    return options
