"""The frontend's command-line flags, and the secrets in the files that they name."""

import dataclasses
import re
import ssl
from datetime import date
from functools import partial
from pathlib import Path

from baton.connect import HTTP_HOST, HTTP_PORT, Wires
from baton.flags import flag
from baton.model_folder import model_folder
from baton.reread import Reread
from baton.telemetry import LogFormat, LogLevel
from baton.tls import server_context
from frontend.access import AccessMode
from frontend.http.keys import Keys, read_keys
from frontend.routing.admission import RoutingSettings
from frontend.turn.thoughts import Seal

MIN_KEY_BYTES = 32
_HOST = re.compile(r"[\w.*-]+")
# As browsers send it: no path, no capitals.
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\sA-Z*]+|null|\*")
_URL = re.compile(r"https?://[^\s/]\S*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontendSettings:
    """The settings of `python -m frontend`."""

    http_host: str = flag("127.0.0.1", "address to listen on", env=HTTP_HOST, metavar="IP")
    http_port: int = flag(8000, "port to listen on", env=HTTP_PORT, metavar="PORT", at_least=0, at_most=65535)
    api_keys_file: Path | None = flag(
        None, "require a key of this file: python -m baton key", env="BATON_API_KEYS_FILE", metavar="PATH"
    )
    share_cache: bool = flag(False, "API keys share cached prompts; cached_tokens shows what others ask")
    tls_cert_file: Path | None = flag(None, "serve HTTPS with this certificate chain (PEM)", metavar="PATH")
    tls_key_file: Path | None = flag(None, "key of that certificate", metavar="PATH")
    tls_client_ca_file: Path | None = flag(
        None, "require client certificates of this authority", metavar="PATH"
    )
    insecure: bool = flag(
        False, "serve other machines without API keys or client certificates", env="BATON_INSECURE"
    )
    no_page: bool = flag(False, "do not serve the live page at /")
    take_over: bool = flag(False, "take the port over from this user's frontend on it, which then drains")
    num_processes: int = flag(1, "processes that share the port", metavar="N", at_least=1, at_most=64)
    routing: RoutingSettings = dataclasses.field(default_factory=RoutingSettings)
    cors_origin: str = flag(
        "", "allowed CORS origins, comma-separated, or *: https://app.example", metavar="URL"
    )
    allowed_host: str = flag(
        "", "other names of this server, comma-separated, or *", env="BATON_ALLOWED_HOST", metavar="NAME"
    )
    model_alias: str = flag(
        "", "model aliases, comma-separated: claude-*=openai/gpt-oss-120b", metavar="NAME=MODEL"
    )
    seal_key_file: Path | None = flag(
        None, "secret (32 bytes or more) of all frontends, to seal reasoning with", metavar="PATH"
    )
    model_path: Path | None = flag(
        None, "tokenizer's folder, or a model id in the hub's cache [the workers']", metavar="PATH"
    )
    no_check_numbers: bool = flag(False, "do not compare what workers of one model compute")
    trusted_numbers: Path | None = flag(
        None, "compare workers with this file: python -m baton doctor --record FILE", metavar="FILE"
    )
    current_date: str = flag(
        "", "date in prompts, YYYY-MM-DD (default: today, UTC)", env="BATON_CURRENT_DATE", metavar="DATE"
    )
    request_timeout_s: float = flag(600.0, "deadline of a request", metavar="S", above=0)
    drain_timeout_s: float = flag(
        30.0, "time for running answers to finish after SIGTERM", metavar="S", at_least=0
    )
    response_store: str = flag(
        "~/.local/state/baton/responses.sqlite3", "or :memory:", env="BATON_RESPONSE_STORE", metavar="FILE"
    )
    otlp_endpoint: str = flag(
        "", "send traces to this OTLP/HTTP receiver, as OTEL_EXPORTER_OTLP_ENDPOINT does", metavar="URL"
    )
    log_level: LogLevel = flag("info", "debug, info, warning or error", metavar="LEVEL")
    log_format: LogFormat = flag(
        "text", "text, or json: one object a line", env="BATON_LOG_FORMAT", metavar="FORMAT"
    )
    access_log: AccessMode = flag(
        "slow", "requests in the log: all, slow (over 1 s, or failed), off", metavar="MODE"
    )
    wires: Wires = dataclasses.field(default_factory=Wires)

    def __post_init__(self) -> None:
        if self.current_date and not _is_date(self.current_date):
            raise ValueError(f"--current-date {self.current_date!r}: must be YYYY-MM-DD")
        parse_aliases(self.model_alias)
        if self.otlp_endpoint and not _URL.fullmatch(self.otlp_endpoint):
            raise ValueError(
                f"--otlp-endpoint {self.otlp_endpoint!r}: must be a URL such as http://localhost:4318"
            )
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"--cors-origin {origin!r}: must be such as https://app.example, or *")
        for host in self.allowed_hosts[1:]:
            if not _HOST.fullmatch(host):
                raise ValueError(f"--allowed-host {host!r}: must be a name without scheme and port, or *")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("--tls-cert-file and --tls-key-file: give both")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("--tls-client-ca-file: needs --tls-cert-file and --tls-key-file")

    def with_model_folder(self) -> "FrontendSettings":
        """The settings with the model's folder if its id on the hub was given. Raises ValueError."""
        try:
            folder = self.model_path and model_folder(self.model_path)
        except ValueError as error:
            raise ValueError(f"--model-path: {error}") from error
        return dataclasses.replace(self, model_path=folder)

    @property
    def authenticates(self) -> bool:
        """Whether clients need a key or a certificate."""
        return self.api_keys_file is not None or self.tls_client_ca_file is not None

    @property
    def cors_origins(self) -> list[str]:
        return _listed(self.cors_origin)

    @property
    def allowed_hosts(self) -> list[str]:
        return [self.http_host, *_listed(self.allowed_host)]


def _listed(given: str) -> list[str]:
    return [each.strip() for each in given.split(",") if each.strip()]


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Credentials:
    """The frontend's secrets. `keys` is None if everyone may send requests, `tls` if over plain HTTP."""

    seal: Seal
    keys: Reread[Keys] | None
    tls: Reread[ssl.SSLContext] | None

    def context(self) -> ssl.SSLContext | None:
        return None if self.tls is None else self.tls.value


def read_credentials(settings: FrontendSettings) -> Credentials:
    """The secrets in the files of the flags. Raises ValueError, with the flag and why."""
    keys_path = settings.api_keys_file
    try:
        flag_name = "--seal-key-file"
        seal = Seal(_seal_key(settings.seal_key_file))
        flag_name = "--api-keys-file"
        keys = None if keys_path is None else Reread([keys_path], partial(read_keys, keys_path))
        flag_name = "--tls-cert-file"
        tls = _tls(settings)
    except (OSError, ValueError) as error:
        raise ValueError(f"{flag_name}: {error}") from error
    return Credentials(seal=seal, keys=keys, tls=tls)


def _tls(settings: FrontendSettings) -> Reread[ssl.SSLContext] | None:
    cert, key, client_ca = settings.tls_cert_file, settings.tls_key_file, settings.tls_client_ca_file
    if cert is None or key is None:
        return None

    def context() -> ssl.SSLContext:
        made = server_context(cert, key, client_ca)
        made.set_alpn_protocols(["http/1.1"])
        return made

    return Reread([path for path in (cert, key, client_ca) if path is not None], context)


def _seal_key(path: Path | None) -> bytes | None:
    if path is None:
        return None
    key = path.read_bytes().strip()
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"{path} has {len(key)} bytes; it must have at least {MIN_KEY_BYTES}")
    return key


def parse_aliases(text: str) -> tuple[tuple[str, str], ...]:
    """Parses comma-separated `PATTERN=MODEL` pairs. Raises ValueError."""
    aliases = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        pattern, _, model = part.partition("=")
        if not pattern or not model:
            raise ValueError(
                f"--model-alias {part!r}: must be PATTERN=MODEL, such as claude-*=openai/gpt-oss-120b"
            )
        aliases.append((pattern, model))
    return tuple(aliases)
