"""The frontend's command-line flags."""

import dataclasses
import re
from datetime import date
from pathlib import Path

from baton.connect import HTTP_HOST, HTTP_PORT, Wires
from baton.flags import flag
from baton.model_folder import model_folder
from baton.telemetry import LogLevel
from frontend.routing.admission import MAX_WAIT_S
from frontend.routing.names import parse_aliases
from frontend.routing.router import RouterMode
from frontend.routing.workers import NO_PROGRESS_S

_HOST = re.compile(r"[\w.*-]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontendSettings:
    """The settings of `python -m frontend`."""

    http_host: str = flag("127.0.0.1", "address to listen on", env=HTTP_HOST, metavar="IP")
    http_port: int = flag(8000, "port to listen on", env=HTTP_PORT, metavar="PORT", at_least=0, at_most=65535)
    api_keys_file: Path | None = flag(
        None,
        "only clients with a key in this file may send requests: python -m baton key",
        env="BATON_API_KEYS_FILE",
        metavar="PATH",
    )
    share_cache: bool = flag(False, "API keys share cached prompts; cached_tokens shows what others ask")
    tls_cert_file: Path | None = flag(None, "serve HTTPS with this certificate chain (PEM)", metavar="PATH")
    tls_key_file: Path | None = flag(None, "key of that certificate", metavar="PATH")
    tls_client_ca_file: Path | None = flag(
        None, "only clients with a certificate of this authority may connect", metavar="PATH"
    )
    insecure: bool = flag(
        False, "serve other machines without API keys or client certificates", env="BATON_INSECURE"
    )
    take_over: bool = flag(False, "take the port over from this user's frontend on it, which then drains")
    num_processes: int = flag(
        1,
        "processes that share the port, each with its own event loop",
        metavar="N",
        at_least=1,
        at_most=64,
    )
    router_mode: RouterMode = flag(
        "round-robin", "load balancing; prefix: turns of a conversation share a worker"
    )
    local_prefill_tokens: int = flag(
        0,
        "prompts of which decode lacks at most N tokens skip the prefill worker",
        metavar="N",
        at_least=0,
    )
    local_prefill_after_s: float = flag(
        0.0, "only while the prefill worker has kept a request waiting for so long", metavar="S", at_least=0
    )
    cors_origin: str = flag(
        "", "allowed CORS origins, comma-separated, or *: https://app.example", metavar="URL"
    )
    allowed_host: str = flag(
        "",
        "without API keys: other names of this server, or *",
        env="BATON_ALLOWED_HOST",
        metavar="NAME",
    )
    model_alias: str = flag(
        "", "model aliases, comma-separated: claude-*=openai/gpt-oss-120b", metavar="NAME=MODEL"
    )
    strict_tools: bool = flag(False, "refuse hosted tools such as web_search instead of ignoring them")
    seal_key_file: Path | None = flag(
        None,
        "secret (32 bytes or more) of all frontends, to seal reasoning with",
        metavar="PATH",
    )
    max_bodies_bytes: int = flag(
        0,
        "memory for all request bodies (default: a 64th of it)",
        env="BATON_MAX_BODIES_BYTES",
        metavar="N",
        at_least=0,
    )
    model_path: Path | None = flag(
        None, "folder with tokenizer.json, or the model's id in the hub's cache [the workers' model path]"
    )
    current_date: str = flag(
        "", "date in prompts, YYYY-MM-DD (default: today, UTC)", env="BATON_CURRENT_DATE", metavar="DATE"
    )
    request_timeout_s: float = flag(600.0, "deadline of a request", metavar="S", above=0)
    max_wait_s: float = flag(
        MAX_WAIT_S,
        "how long requests wait while all workers are full; 0: until their deadline",
        metavar="S",
        at_least=0,
    )
    no_progress_s: float = flag(
        NO_PROGRESS_S, "a worker that gets on with no request for so long is tried", metavar="S", above=0
    )
    wait_for_worker_s: float = flag(
        15.0,
        "how long requests wait for a lost decode worker or NATS to return",
        metavar="S",
        at_least=0,
    )
    drain_timeout_s: float = flag(
        30.0, "time for running answers to finish after SIGTERM", metavar="S", at_least=0
    )
    response_store: str = flag(
        "~/.local/state/baton/responses.sqlite3",
        "SQLite file for stored responses, or :memory:",
        env="BATON_RESPONSE_STORE",
        metavar="PATH",
    )
    log_level: LogLevel = flag("info", "least severity of messages that are logged")
    wires: Wires = dataclasses.field(default_factory=Wires)

    def __post_init__(self) -> None:
        if self.current_date and not _is_date(self.current_date):
            raise ValueError(f"--current-date {self.current_date!r}: must be YYYY-MM-DD")
        parse_aliases(self.model_alias)
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
    def knows_clients(self) -> bool:
        """Whether only clients that prove themselves are served."""
        return self.api_keys_file is not None or self.tls_client_ca_file is not None

    @property
    def cors_origins(self) -> list[str]:
        """The allowed CORS origins."""
        return _listed(self.cors_origin)

    @property
    def allowed_hosts(self) -> list[str]:
        """The names under which this server is served."""
        return [self.http_host, *_listed(self.allowed_host)]


def _listed(given: str) -> list[str]:
    return [each.strip() for each in given.split(",") if each.strip()]


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False
