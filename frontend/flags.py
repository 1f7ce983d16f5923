"""The frontend's flags."""

import dataclasses
from pathlib import Path

from baton.connect import HTTP_HOST, HTTP_PORT, Wires
from baton.flags import flag
from frontend.routing.names import parse_aliases
from frontend.routing.router import RouterMode


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrontendSettings:
    """What `python -m frontend` takes."""

    http_host: str = flag("127.0.0.1", "address to listen on", env=HTTP_HOST, metavar="IP")
    http_port: int = flag(8000, "port to listen on", env=HTTP_PORT, metavar="PORT")
    router_mode: RouterMode = flag("round-robin", "how workers are picked")
    cors_origin: str = flag(
        "", "origins whose pages may ask, comma-separated, or *: https://app.example", metavar="URL"
    )
    model_alias: str = flag(
        "", "more names for models, comma-separated: claude-*=openai/gpt-oss-120b", metavar="NAME=MODEL"
    )
    strict_tools: bool = flag(False, "refuse tools that only their vendor's servers run: web_search")
    seal_key_file: Path | None = flag(
        None,
        "a secret of 32 bytes or more: frontends that share it open each other's encrypted reasoning",
    )
    model_path: Path | None = flag(None, "folder with tokenizer.json, if the workers' is not on this machine")
    request_timeout_s: float = flag(600.0, "deadline of a request", metavar="S")
    drain_timeout_s: float = flag(30.0, "how long running answers may go on after SIGTERM", metavar="S")
    response_store: str = flag(
        "~/.local/state/baton/responses.sqlite3",
        "file in which responses are kept, or :memory:",
        env="BATON_RESPONSE_STORE",
        metavar="PATH",
    )
    log_level: str = flag("info", "debug, info, warning or error")
    wires: Wires = dataclasses.field(default_factory=Wires)

    def __post_init__(self) -> None:
        if not 0 <= self.http_port <= 65535:
            raise ValueError(f"--http-port {self.http_port}: a port is 0 to 65535")
        parse_aliases(self.model_alias)
        if self.request_timeout_s <= 0:
            raise ValueError(f"--request-timeout-s {self.request_timeout_s}: must be more than 0")

    @property
    def cors_origins(self) -> list[str]:
        """The origins whose pages may ask."""
        return [origin.strip() for origin in self.cors_origin.split(",") if origin.strip()]
