"""Registry and request plane flags of both processes, and the objects they select."""

import dataclasses
import functools
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from baton.discovery import Discovery
from baton.dynamo.runtime import dynamo_namespace, dynamo_plane, start_runtime
from baton.files import FilesDiscovery, default_registry, make_private
from baton.flags import flag, without_secrets
from baton.own_address import AUTO, check_address, own_address
from baton.pace import LIVENESS_S, TICK_S
from baton.peer_tls import PeerTls, peer_tls
from baton.tls import client_context, client_files
from baton.transport import Transport

if TYPE_CHECKING:
    from baton.dynamo.plane import DynamoPlane

# The frontend's address. Dynamo's names take precedence, because the images set HTTP_HOST.
HTTP_HOST = ("DYN_HTTP_HOST", "HTTP_HOST")
HTTP_PORT = ("DYN_HTTP_PORT", "HTTP_PORT")
_ETCD = "http://127.0.0.1:2379"
_NATS = "nats://127.0.0.1:4222"
_PATH = re.compile(r"[\w-]+(\.[\w-]+){2}")
_ETCD_TLS = ("ETCD_AUTH_CA", "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY")
_NATS_TLS = ("NATS_AUTH_CA", "NATS_AUTH_CLIENT_CERT", "NATS_AUTH_CLIENT_KEY")
_NATS_LOGIN = {"user": "NATS_AUTH_USERNAME", "password": "NATS_AUTH_PASSWORD", "token": "NATS_AUTH_TOKEN"}
_NOT_SERVED = ("NATS_AUTH_NKEY", "NATS_AUTH_CREDENTIALS_FILE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wires:
    """How this process finds and reaches the others.

    By default the registry is etcd if its addresses are given, else a local folder; the request plane is NATS
    if its addresses are given, else TCP."""

    discovery_backend: Literal["file", "etcd"] | None = flag(None, "registry", env="BATON_DISCOVERY_BACKEND")
    request_plane: Literal["tcp", "nats", "dynamo"] | None = flag(
        None, "request plane; dynamo: also the registry is Dynamo's", env="BATON_REQUEST_PLANE"
    )
    dynamo_endpoints: str | None = flag(
        None,
        "Dynamo's endpoints [dynamo.prefill.generate,dynamo.backend.generate]",
        env="BATON_DYNAMO_ENDPOINTS",
        metavar="PATHS",
    )
    etcd_endpoints: str | None = flag(
        None, f"etcd addresses; they select etcd [{_ETCD}]", env="ETCD_ENDPOINTS", metavar="URLS"
    )
    nats_server: str | None = flag(
        None, f"NATS addresses; they select NATS [{_NATS}]", env="NATS_SERVER", metavar="URLS"
    )
    file_registry: Path | None = flag(None, "folder of the file registry", env="BATON_FILE_REGISTRY")
    host: str = flag(
        "127.0.0.1", "own address, for peers; auto: by the route to etcd", env="BATON_HOST", metavar="IP"
    )
    liveness_s: float = flag(
        LIVENESS_S,
        "a worker that is silent for this long is lost",
        env="BATON_LIVENESS_S",
        metavar="S",
        at_least=4 * TICK_S,  # heartbeats
    )

    def __post_init__(self) -> None:
        if self.host in ("", "0.0.0.0", "::"):  # noqa: S104  refused here
            raise ValueError(f"--host {self.host!r}: peers cannot reach it; use this machine's own address")
        for path in self.dynamo_paths:
            if not _PATH.fullmatch(path):
                raise ValueError(
                    f"--dynamo-endpoints {path}: must be NAMESPACE.COMPONENT.ENDPOINT, comma-separated"
                )
        for url in self.etcd_urls if self.registry == "etcd" else ():
            _check_address("--etcd-endpoints (ETCD_ENDPOINTS)", url, ("http", "https"))
        for url in self.nats_urls if self.plane == "nats" else ():
            _check_address("--nats-server (NATS_SERVER)", url, ("nats", "tls"))

    @property
    def etcd_urls(self) -> list[str]:
        return [url.strip().rstrip("/") for url in (self.etcd_endpoints or _ETCD).split(",")]

    @property
    def nats_urls(self) -> list[str]:
        given = [url.strip() for url in (self.nats_server or _NATS).split(",")]
        return [url if "://" in url else f"nats://{url}" for url in given]

    @property
    def dynamo_paths(self) -> list[str]:
        space = dynamo_namespace()
        given = self.dynamo_endpoints or f"{space}.prefill.generate,{space}.backend.generate"
        return [path.strip().removeprefix("dyn://") for path in given.split(",")]

    def discovery(self) -> Discovery:
        """The selected registry; connects on first use."""
        if self.plane == "dynamo":
            return self._dynamo
        if self.registry == "etcd":
            from baton.etcd import EtcdDiscovery

            user = os.environ.get("ETCD_AUTH_USERNAME")
            login = (user, os.environ.get("ETCD_AUTH_PASSWORD", "")) if user else None
            tls_files = client_files(*_ETCD_TLS)
            return EtcdDiscovery(",".join(self.etcd_urls), login=login, tls_files=tls_files)
        return FilesDiscovery(self._registry_folder())

    def transport(self) -> Transport:
        """The selected request plane; connects on first use."""
        if self.plane == "dynamo":
            return self._dynamo
        if self.plane == "nats":
            from baton.nats import NatsTransport

            return NatsTransport(",".join(self.nats_urls), liveness_s=self.liveness_s, **nats_options())
        from baton.tcp import TcpTransport

        return TcpTransport(host=self.address(), liveness_s=self.liveness_s, tls=self.tls())

    def address(self) -> str:
        """The address to bind and to announce. Raises ValueError."""
        return own_address([*chain(*self._servers.values())]) if self.host == AUTO else self.host

    def tls(self) -> PeerTls | None:
        return peer_tls()

    def plane_name(self) -> str:
        """The request plane, for messages."""
        names = {
            "dynamo": f"the registry of Dynamo, {','.join(chain(*self._servers.values())) or 'a folder'}",
            "nats": f"NATS at {','.join(self.nats_urls)}",
        }
        return without_secrets(names.get(self.plane, "TCP"))

    def registry_name(self) -> str:
        if self.plane == "dynamo":
            return self.plane_name()
        if self.registry == "etcd":
            return without_secrets(f"etcd at {','.join(self.etcd_urls)}")
        return f"the registry {self._registry_folder()}"

    def check(self) -> None:
        """Raise UnsafeFolder if the file registry is not safe; ValueError if a login or a certificate is not
        complete, or the address is not this machine's."""
        self.tls()
        if self.plane == "dynamo" and not find_spec("dynamo"):
            raise ValueError("--request-plane dynamo needs Dynamo's runtime: pip install '.[dynamo]'")
        if self.registry == "etcd":
            client_files(*_ETCD_TLS)
        elif self.plane != "dynamo":
            make_private(self._registry_folder())
        if self.plane == "nats":
            nats_options()
        check_address(self.address())

    @property
    def registry(self) -> str:
        """`etcd` or `file`."""
        if self.discovery_backend is None and self.plane == "dynamo":
            given = "file" if self.file_registry or os.environ.get("DYN_FILE_KV") else "etcd"
            return os.environ.get("DYN_DISCOVERY_BACKEND") or given
        return self.discovery_backend or ("etcd" if self.etcd_endpoints else "file")

    @property
    def plane(self) -> str:
        """`dynamo`, `nats` or `tcp`."""
        return self.request_plane or ("nats" if self.nats_server else "tcp")

    @property
    def _servers(self) -> dict[str, list[str]]:
        """The servers in use, by the variable in which Dynamo reads them."""
        plane = dynamo_plane() if self.plane == "dynamo" else self.plane
        found = {"ETCD_ENDPOINTS": self.etcd_urls} if self.registry == "etcd" else {}
        return found | ({"NATS_SERVER": self.nats_urls} if plane == "nats" else {})

    @functools.cached_property
    def _dynamo(self) -> "DynamoPlane":
        from baton.dynamo.plane import DynamoPlane

        given = {"NATS_SERVER": self.nats_server, "DYN_FILE_KV": self.file_registry}
        environ = {name: str(value) for name, value in given.items() if value}
        start = functools.partial(start_runtime, self.registry, self.address(), self._servers, environ)
        return DynamoPlane(start, self.dynamo_paths, self.liveness_s)

    def _registry_folder(self) -> Path:
        return self.file_registry or default_registry()


def nats_options() -> dict[str, Any]:
    """nats-py's options from Dynamo's variables; they count before those in the URL. Raises ValueError with
    the variable's name."""
    options: dict[str, Any] = {
        name: os.environ[variable] for name, variable in _NATS_LOGIN.items() if os.environ.get(variable)
    }
    user, password, token = _NATS_LOGIN.values()
    for variable in filter(os.environ.get, _NOT_SERVED):
        supported = f"{user} with {password}, {token}, or {_NATS_TLS[1]}"
        raise ValueError(f"{variable}: not supported; use {supported}")
    if ("user" in options) != ("password" in options):
        raise ValueError(f"{user} and {password}: set both")
    ca, cert, key = map(os.environ.get, _NATS_TLS)
    if cert and key and not ca:
        raise ValueError(f"{_NATS_TLS[1]}: needs {_NATS_TLS[0]}, the servers' authority")
    files = client_files(*_NATS_TLS)
    if ca:  # the only authority that is trusted
        options["tls"] = client_context(*files)
    return options


def _check_address(named: str, url: str, schemes: Sequence[str]) -> None:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in schemes and parts.hostname and parts.port != 0 and parts.path in ("", "/")
    except ValueError:  # a port that is none, or an address in half a bracket
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"{named} {without_secrets(url)}: must be {schemes[0]}://host:port or {schemes[1]}://host:port, "
            "with a port from 1 to 65535"
        )
