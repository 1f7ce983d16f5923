"""The TLS settings of the HTTP server: its certificate, and the authority of its clients' ones."""

import ssl
from pathlib import Path


def server_context(cert: Path, key: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    """TLS 1.2 or newer with that certificate chain; with `client_ca`, clients must have a certificate of it.
    Raises ValueError with a sentence.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key, password=_refuse_password)
    except OSError as error:
        raise ValueError(
            f"{cert} and {key} are not a certificate and its key in PEM: {_why(error)}"
        ) from None
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(client_ca)
        except OSError as error:
            raise ValueError(f"{client_ca} has no certificates in PEM: {_why(error)}") from None
    return context


def _refuse_password() -> str:
    # Otherwise OpenSSL asks on the terminal.
    raise ValueError("the key is encrypted; give one without a password")


def _why(error: OSError) -> str:
    """OpenSSL's reason without the line of its source."""
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return str(reason).lower().replace("_", " ")
