"""Registry and request plane flags of both processes, and the objects they select."""

import dataclasses
import os
from pathlib import Path
from typing import Literal

from baton.discovery import Discovery
from baton.flags import flag, without_secrets
from baton.nats_login import nats_options
from baton.pace import LIVENESS_S, TICK_S
from baton.peer_tls import PeerTls, peer_tls
from baton.registry_folder import default_registry, make_private
from baton.transport import Transport

# The frontend's address. Dynamo's names take precedence, because the images set HTTP_HOST.
HTTP_HOST = ("DYN_HTTP_HOST", "HTTP_HOST")
HTTP_PORT = ("DYN_HTTP_PORT", "HTTP_PORT")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wires:
    """How this process finds and reaches the others.

    By default the registry is etcd if ETCD_ENDPOINTS is set, else a local folder; the request plane is NATS
    if NATS_SERVER is set, else TCP.
    """

    discovery_backend: Literal["file", "etcd"] | None = flag(None, "registry", env="BATON_DISCOVERY_BACKEND")
    request_plane: Literal["tcp", "nats"] | None = flag(None, "request plane", env="BATON_REQUEST_PLANE")
    etcd_endpoints: str = flag(
        "http://127.0.0.1:2379", "etcd addresses", env="ETCD_ENDPOINTS", metavar="URLS"
    )
    nats_server: str = flag("nats://127.0.0.1:4222", "NATS addresses", env="NATS_SERVER", metavar="URLS")
    file_registry: Path | None = flag(None, "folder of the file registry", env="BATON_FILE_REGISTRY")
    host: str = flag("127.0.0.1", "address to bind and to announce to peers", env="BATON_HOST", metavar="IP")
    liveness_s: float = flag(
        LIVENESS_S, "a worker that is silent for so long is lost", env="BATON_LIVENESS_S", metavar="S"
    )

    def __post_init__(self) -> None:
        if self.liveness_s < 4 * TICK_S:
            raise ValueError(
                f"--liveness-s {self.liveness_s:g}: must be at least {4 * TICK_S:g}, as workers send a "
                f"heartbeat every {TICK_S} s"
            )
        if self.host in ("", "0.0.0.0", "::"):  # noqa: S104  refused here
            raise ValueError(f"--host {self.host!r}: peers cannot reach it; use this machine's own address")

    def discovery(self) -> Discovery:
        """The selected registry; connects on first use."""
        if self._registry() == "etcd":
            from baton.etcd import EtcdDiscovery

            return EtcdDiscovery(
                self.etcd_endpoints,
                username=os.environ.get("ETCD_AUTH_USERNAME"),
                password=os.environ.get("ETCD_AUTH_PASSWORD"),
                ca_file=_path_from("ETCD_AUTH_CA"),
                cert_file=_path_from("ETCD_AUTH_CLIENT_CERT"),
                key_file=_path_from("ETCD_AUTH_CLIENT_KEY"),
            )
        from baton.files import FilesDiscovery

        return FilesDiscovery(self._registry_folder())

    def transport(self) -> Transport:
        """The selected request plane; connects on first use."""
        if self._plane() == "nats":
            from baton.nats import NatsTransport

            return NatsTransport(self.nats_server, liveness_s=self.liveness_s, **nats_options())
        from baton.tcp import TcpTransport

        return TcpTransport(host=self.host, liveness_s=self.liveness_s, tls=self.tls())

    def tls(self) -> PeerTls | None:
        """That of connections between this process and others, if the environment asks for it."""
        return peer_tls()

    def plane_name(self) -> str:
        """The request plane, for messages."""
        return f"NATS at {without_secrets(self.nats_server)}" if self._plane() == "nats" else "TCP"

    def registry_name(self) -> str:
        """The registry, for messages."""
        if self._registry() == "etcd":
            return f"etcd at {without_secrets(self.etcd_endpoints)}"
        return f"the registry {self._registry_folder()}"

    def check(self) -> None:
        """Raise UnsafeFolder, with advice in its message, if the file registry is not safe; CredentialError
        if the login to NATS or the certificate for peers is not complete.
        """
        self.tls()
        if self._registry() == "file":
            make_private(self._registry_folder())
        if self._plane() == "nats":
            nats_options()

    def __str__(self) -> str:
        return f"discovery={self._registry()} plane={self._plane()}"

    def _registry_folder(self) -> Path:
        return self.file_registry or default_registry()

    def _registry(self) -> str:
        return self.discovery_backend or ("etcd" if os.environ.get("ETCD_ENDPOINTS") else "file")

    def _plane(self) -> str:
        return self.request_plane or ("nats" if os.environ.get("NATS_SERVER") else "tcp")


def _path_from(variable: str) -> Path | None:
    return Path(os.environ[variable]) if os.environ.get(variable) else None
