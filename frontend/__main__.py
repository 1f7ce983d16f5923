"""`python -m frontend`: the HTTP server for OpenAI's and Anthropic's APIs."""

import asyncio
import dataclasses
import ipaddress
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from baton.discovery import Discovery
from baton.flags import parse
from baton.listener import Accepting
from baton.process import Shutdown, first_of, leave_start_uncollected, needed, run
from baton.registry_folder import UnsafeFolder
from baton.reread import kept_current
from baton.telemetry import configure_logging
from baton.tls import CredentialError
from baton.transport import Transport
from frontend.app import ServerState, create_app, envelope_of
from frontend.credentials import Credentials, read_credentials
from frontend.flags import FrontendSettings
from frontend.http.authentication import Authentication
from frontend.http.bodies import Bodies, default_bytes
from frontend.http.browsers import Browsers
from frontend.http.exchange import AsgiApp
from frontend.http.hosts import Hosts
from frontend.http.limits import Quotas
from frontend.http.server import HttpServer
from frontend.http.services import Services
from frontend.metrics import Metrics
from frontend.processes.handover import ProcessEnd
from frontend.processes.siblings import Shared, Siblings
from frontend.processes.supervisor import Supervisor
from frontend.processes.takeover import Offer, Taken, inherited
from frontend.responses.database import MEMORY
from frontend.responses.runs import ResponseState
from frontend.responses.store import ResponseStore, StoreFailure
from frontend.routing.fleet import Fleet
from frontend.routing.generate import Generator, LocalPrefill
from frontend.routing.names import parse_aliases
from frontend.turn.thoughts import Thoughts

SYNC_TIMEOUT_S = 5.0
"""How long a frontend waits for the registry before it answers that there are no workers."""

log = logging.getLogger("frontend")


def main(argv: list[str]) -> int:
    """Exit status: 0 after a drain, 2 if the settings are wrong or the port is taken."""
    parsed = parse(
        FrontendSettings,
        argv,
        prog="python -m frontend",
        description="HTTP server for OpenAI's and Anthropic's APIs.",
    )
    configure_logging(parsed.settings.log_level)
    log.info("settings %s", " ".join(parsed.lines()))
    try:
        settings = parsed.settings.with_model_folder()
        settings.wires.check()
        credentials = read_credentials(settings)
        listener, taken = _listener(settings)
    except (UnsafeFolder, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    # Without a running frontend, there is nothing to take over.
    settings = dataclasses.replace(settings, take_over=taken.listener is not None)
    serve_on = _serve_alone if settings.num_processes == 1 else _serve_in_processes
    return serve_on(settings, credentials, listener, taken)


def _listener(settings: FrontendSettings) -> tuple[socket.socket, Taken]:
    """The listening socket, and the frontend that it was taken from. Raises ValueError with a sentence."""
    where = f"{settings.http_host}:{settings.http_port}"
    with ExitStack() as refusing:
        taken = Taken(settings.http_port if settings.take_over else None)
        refusing.callback(taken.close)
        try:
            listener = refusing.enter_context(inherited() or taken.listener or _listen(settings))
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise ValueError(f"cannot listen on {where}: {why}; choose another --http-port") from error
        if not (settings.knows_clients or settings.insecure or _is_loopback(listener)):
            raise ValueError(
                f"other machines can reach {where}, and there are no API keys: give --api-keys-file, or "
                "--insecure if each of them may send requests (or 127.0.0.1 as --http-host)"
            )
        refusing.pop_all()
        return listener, taken


def _is_loopback(listener: socket.socket) -> bool:
    return listener.family == socket.AF_UNIX or ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def _serve_alone(
    settings: FrontendSettings, credentials: Credentials, listener: socket.socket, taken: Taken
) -> int:
    async def main(shutdown: Shutdown) -> int:
        offer = Offer(listener, _watch, shutdown.ask)

        def listening() -> None:
            taken.serving()
            offer.open()

        try:
            return await serve(settings, credentials, listener, Siblings(listening=listening), shutdown)
        finally:
            offer.close()

    return run(main)


def _watch(readable: socket.socket, callback: Callable[[], object] | None) -> None:
    loop = asyncio.get_running_loop()
    if callback is None:
        loop.remove_reader(readable)
    else:
        loop.add_reader(readable, callback)


def _serve_in_processes(
    settings: FrontendSettings, credentials: Credentials, listener: socket.socket, taken: Taken
) -> int:
    address = listener.getsockname()[:2]
    with tempfile.TemporaryDirectory(prefix="baton-frontend-") as folder:

        def serve_one(index: int, channel: socket.socket) -> int:
            async def main(shutdown: Shutdown) -> int:
                end = ProcessEnd(channel, address, shutdown.ask)
                siblings = Siblings(Path(folder), index, settings.num_processes, end.ready)
                return await serve(settings, credentials, end, siblings, shutdown)

            return run(main)

        return Supervisor(listener, settings.num_processes, serve_one, taken.serving).run()


async def serve(
    settings: FrontendSettings,
    credentials: Credentials,
    listener: Accepting,
    siblings: Siblings,
    shutdown: Shutdown,
) -> int:
    """Serve until shutdown, then let running answers finish within the drain timeout."""
    try:
        await settings.wires.check_access()
    except CredentialError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    discovery, transport = settings.wires.discovery(), settings.wires.transport()
    try:
        store = await _open_store(settings.response_store, siblings)
    except StoreFailure as error:
        sys.stderr.write(f"error: --response-store: {error.message}\n")
        return 2
    responses = ResponseState(store, elsewhere=siblings)
    fleet = _fleet(settings, discovery, transport)
    services = _services(settings, fleet, transport, siblings)
    quotas = Quotas(siblings.share_use)
    app = _app(settings, credentials, services, responses, quotas)
    if not settings.knows_clients:
        app = Hosts(app, settings.allowed_hosts)
    server = HttpServer(app, settings.drain_timeout_s, tls=credentials.context)
    answering = siblings.answering(Shared(services.thoughts, services.metrics, responses.runs, quotas))
    async with fleet.keep_current() as following, answering, kept_current(credentials.rereadable):
        leave_start_uncollected()
        ready = ready_to_serve(settings, fleet, transport)
        await first_of(shutdown.wait(), asyncio.shield(following), ready)
        if not shutdown.asked:
            server.start(listener)
            scheme = "http" if credentials.tls is None else "https"
            log.info("listening address=%s://%s:%d", scheme, *listener.getsockname()[:2])
            siblings.listening()
            await first_of(shutdown.wait(), asyncio.shield(following))
        await asyncio.gather(server.drain(), responses.runs.drain(settings.drain_timeout_s))
    await responses.close()
    await transport.close()
    await discovery.close()
    return 0


async def ready_to_serve(settings: FrontendSettings, fleet: Fleet, transport: Transport) -> None:
    """Return when requests can be served: the request plane can be reached, the registered workers are
    known, and the tokenizers of their models are loaded. Connections wait in the listening socket's queue.

    Without the registry it returns after SYNC_TIMEOUT_S, unless the port is taken over: then the other
    frontend serves meanwhile. Raises NotStarted.
    """
    await needed(settings.wires.plane_name(), transport.reachable())
    if settings.take_over:
        await needed("the registry", fleet.synced.wait())
    else:
        await first_of(fleet.synced.wait(), asyncio.sleep(SYNC_TIMEOUT_S))


def _fleet(settings: FrontendSettings, discovery: Discovery, transport: Transport) -> Fleet:
    return Fleet(
        discovery,
        transport,
        model_path=settings.model_path,
        request_timeout_s=settings.request_timeout_s,
        aliases=parse_aliases(settings.model_alias),
        no_progress_s=settings.no_progress_s,
        current_date=settings.current_date,
    )


def _app(
    settings: FrontendSettings,
    credentials: Credentials,
    services: Services,
    responses: ResponseState,
    quotas: Quotas,
) -> AsgiApp:
    app: AsgiApp = create_app(services, ServerState(responses, credentials.seal))
    if (keys := credentials.keys) is not None:
        app = Authentication(app, lambda: keys.value, envelope_of, quotas, services.metrics)
    return Browsers(app, settings.cors_origins)


def _services(settings: FrontendSettings, fleet: Fleet, transport: Transport, siblings: Siblings) -> Services:
    metrics = Metrics()
    return Services(
        fleet=fleet,
        generator=Generator(
            transport,
            fleet,
            settings.router_mode,
            metrics.routing,
            local_prefill=LocalPrefill(settings.local_prefill_tokens, settings.local_prefill_after_s),
            wait_for_worker_s=settings.wait_for_worker_s,
            max_wait_s=settings.max_wait_s,
            num_processes=settings.num_processes,
        ),
        metrics=metrics,
        other_metrics=siblings.metrics,
        thoughts=Thoughts(share=siblings.share),
        request_timeout_s=settings.request_timeout_s,
        strict_tools=settings.strict_tools,
        share_cache=settings.share_cache,
        bodies=Bodies((settings.max_bodies_bytes or default_bytes()) // settings.num_processes),
    )


async def _open_store(path: str, siblings: Siblings) -> ResponseStore:
    """The store at that path. If the default path is not writable, responses are kept in memory; several
    processes keep in their folder what would be in memory.
    """
    folder = siblings.folder
    memory = MEMORY if folder is None else str(folder / "responses.sqlite3")
    store = ResponseStore(memory if path == MEMORY else path, address=siblings.address)
    try:
        await store.open()
    except StoreFailure as error:
        if path != FrontendSettings.response_store:
            raise
        log.warning("responses are lost when this frontend ends error=%s", error)
        store = ResponseStore(memory, address=siblings.address)
    return store


def _listen(settings: FrontendSettings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.http_host else socket.AF_INET
    address = (settings.http_host, settings.http_port)
    return socket.create_server(address, family=family, backlog=2048)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
