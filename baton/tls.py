"""Builds every TLS context; explains why one cannot be built or a handshake failed."""

import os
import ssl
from pathlib import Path

_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "RECORD_LAYER_FAILURE"})


def server_context(cert: Path, key: Path, client_ca: Path | None = None) -> ssl.SSLContext:
    """TLS 1.2 or newer with that certificate chain; with `client_ca`, clients must have a certificate of it.
    Raises ValueError with a sentence."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, client_ca, cert, key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_context(
    ca: Path | None = None, cert: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """TLS 1.2 or newer with servers whose certificate is of `ca` (default: the system's authorities) and has
    their name; shows `cert` if there is one. Raises ValueError with a sentence."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, ca, cert, key)
    if ca is None:
        context.load_default_certs()
    return context


def client_files(ca: str, cert: str, key: str) -> tuple[Path | None, Path | None, Path | None]:
    """The files that these variables name, of which `client_context` makes a context. Raises ValueError with
    the variables' names."""
    names = (ca, cert, key)
    ca_file, cert_file, key_file = (
        Path(value) if (value := os.environ.get(each)) else None for each in names
    )
    if (cert_file is None) != (key_file is None):
        raise ValueError(f"{cert} and {key}: set both")
    try:
        client_context(ca_file, cert_file, key_file)
    except ValueError as error:
        raise ValueError(f"{', '.join(filter(os.environ.get, names))}: {error}") from error
    return ca_file, cert_file, key_file


def reason(error: OSError) -> str:
    """OpenSSL's reason without the line of its source."""
    found = getattr(error, "verify_message", None) or getattr(error, "reason", None) or error.strerror
    return str(found or error).lower().replace("_", " ")


def peers_fault(error: ssl.SSLError) -> str:
    """Why a handshake with a peer failed: a sentence about `it`."""
    name = str(error.reason or "")
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid for this process's authority: {reason(error)}"
    if name == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it has no certificate"
    if "ALERT" in name:
        return f"it refuses this process's certificate: {reason(error)}"
    return "it does not speak TLS" if name in _NO_TLS else f"TLS failed: {reason(error)}"


def _context(protocol: int, ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except OSError as error:
            raise ValueError(f"{ca} has no certificates in PEM: {reason(error)}") from None
    if cert is not None:
        try:
            context.load_cert_chain(cert, key, password=_refuse_password)
        except OSError as error:
            raise ValueError(
                f"{cert} and {key or cert} are not a certificate and its key in PEM: {reason(error)}"
            ) from None
    return context


def _refuse_password() -> str:
    # Otherwise OpenSSL asks on the terminal.
    raise ValueError("the key is encrypted; give one without a password")
