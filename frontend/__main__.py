"""`python -m frontend`: the HTTP server for OpenAI's and Anthropic's APIs."""

import asyncio
import dataclasses
import errno
import ipaddress
import logging
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import uvloop

from baton.discovery import Discovery
from baton.files import UnsafeFolder
from baton.flags import parse
from baton.number_check import read_trusted
from baton.process import end, first_of, leave_start_uncollected, needed, run
from baton.telemetry import configure_logging, print_error
from baton.transport import Transport
from frontend.access import log_load, log_requests
from frontend.app import create_app
from frontend.flags import Credentials, FrontendSettings, parse_aliases, read_credentials
from frontend.http.body import Bodies, default_bytes
from frontend.http.exchange import AsgiApp
from frontend.http.guards import PAGE_PATHS, Guards
from frontend.http.respond import BeginTrace, Services
from frontend.http.server import HttpServer
from frontend.metrics import Metrics
from frontend.processes.siblings import Siblings
from frontend.processes.supervisor import Place, Port, Supervisor
from frontend.responses.runs import ResponseState
from frontend.responses.store import MEMORY, ResponseStore, StoreFailure
from frontend.routing.fleet import Fleet
from frontend.routing.generate import Generator
from frontend.turn.thoughts import Seal, Thoughts

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
    configure_logging(parsed.settings.log_level, parsed.settings.log_format)
    place = Place.from_environ()
    if place is None:
        log.info("settings %s", ", ".join(parsed.lines()) or "are the defaults")
    try:
        settings = parsed.settings.with_model_folder()
        settings.wires.check()
        credentials = read_credentials(settings)
        if place is not None:
            return _serve_in_place(settings, credentials, place)
        port = _port(settings)
    except (UnsafeFolder, ValueError) as error:
        print_error(error)
        return 2
    if settings.num_processes == 1:
        return _serve_alone(settings, credentials, port)
    command = [sys.executable, "-m", "frontend", *argv]
    with tempfile.TemporaryDirectory(prefix="baton-frontend-") as folder:
        return uvloop.run(Supervisor(port, command, settings.num_processes, folder).run())


def _where(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _port(settings: FrontendSettings) -> Port:
    """The port to serve on. Raises ValueError with a sentence."""
    where = _where(settings.http_host, settings.http_port)
    port = Port.taken(settings.http_port) if settings.take_over else None
    family = socket.AF_INET6 if ":" in settings.http_host else socket.AF_INET
    address = (settings.http_host, settings.http_port)
    try:
        port = port or Port(socket.create_server(address, family=family, backlog=2048))
    except OSError as error:
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror  # negative: of a name
        wrong = "--http-port" if number in (errno.EADDRINUSE, errno.EACCES) else "--http-host"
        raise ValueError(f"cannot listen on {where}: {why}; choose another {wrong}") from error
    is_local = ipaddress.ip_address(port.listener.getsockname()[0]).is_loopback
    if not (settings.authenticates or settings.insecure or is_local):
        port.close()
        raise ValueError(
            f"other machines can reach {where}, and there are no API keys: give --api-keys-file, or "
            "--insecure if each of them may send requests (or 127.0.0.1 as --http-host)"
        )
    return port


def _serve_alone(settings: FrontendSettings, credentials: Credentials, port: Port) -> int:
    settings = dataclasses.replace(settings, take_over=port.is_taken)

    async def main(shutdown: asyncio.Event) -> int:
        listening = asyncio.Event()

        async def pass_port_on() -> None:
            await listening.wait()
            await first_of(shutdown.wait(), port.passed_on())
            shutdown.set()

        passing = asyncio.create_task(pass_port_on())
        try:
            siblings = Siblings(listening=listening.set)
            return await serve(settings, credentials, port.listener, siblings, shutdown)
        finally:
            passing.cancel()
            port.close()

    return run(main)


def _serve_in_place(settings: FrontendSettings, credentials: Credentials, place: Place) -> int:
    """Serve as one of the supervisor's processes."""
    supervisor = os.getppid()
    settings = dataclasses.replace(settings, take_over=place.takes_over)

    async def main(shutdown: asyncio.Event) -> int:
        place.watch(shutdown.set)
        listener = socket.socket(fileno=place.listener)
        siblings = Siblings(Path(place.folder), place.index, settings.num_processes, place.report_ready)
        return await serve(settings, credentials, listener, siblings, shutdown)

    status = run(main)
    if os.getppid() != supervisor:  # it was killed, and the folder may have conversations
        shutil.rmtree(place.folder, ignore_errors=True)
    return status


async def serve(
    settings: FrontendSettings,
    credentials: Credentials,
    listener: socket.socket,
    siblings: Siblings,
    shutdown: asyncio.Event,
) -> int:
    """Serve until shutdown, then let running answers finish within the drain timeout."""
    try:
        store = await _open_store(settings.response_store, siblings)
        discovery, transport = settings.wires.discovery(), settings.wires.transport()
        services = _services(settings, credentials.seal, discovery, transport, siblings)
    except ValueError as error:
        print_error(error)
        return 2
    responses = ResponseState(store, call_run=siblings.call_run)
    app = _app(settings, credentials, services, responses)
    server = HttpServer(app, settings.drain_timeout_s, tls=credentials.context)
    part = services.snapshots.part
    answering = siblings.answering(services.thoughts, services.metrics, responses, part)
    services.snapshots.start()
    log_load(services.metrics, services.snapshots)
    async with services.fleet.keep_current() as following, answering:
        leave_start_uncollected()
        ready = ready_to_serve(settings, services.fleet, transport)
        await first_of(shutdown.wait(), asyncio.shield(following), ready)
        if not shutdown.is_set():
            server.start(listener, is_shared=settings.num_processes > 1)
            scheme = "http" if credentials.tls is None else "https"
            log.info("listening address=%s://%s", scheme, _where(*listener.getsockname()[:2]))
            siblings.listening()
            await first_of(shutdown.wait(), asyncio.shield(following))
        services.snapshots.close()
        await asyncio.gather(server.drain(), responses.drain(settings.drain_timeout_s))
    await responses.close()
    await transport.close()
    await discovery.close()
    return 0


async def ready_to_serve(settings: FrontendSettings, fleet: Fleet, transport: Transport) -> None:
    """Return when requests can be served: the request plane can be reached, the registered workers are
    known, and the tokenizers of their models are loaded. Connections wait in the listening socket's queue.

    Without the registry it returns after SYNC_TIMEOUT_S, unless the port is taken over: then the other
    frontend serves meanwhile. Raises NotStarted."""
    await needed(settings.wires.plane_name(), transport.reachable())
    if settings.take_over:
        await needed("the registry", fleet.synced.wait())
    else:
        await first_of(fleet.synced.wait(), asyncio.sleep(SYNC_TIMEOUT_S))


def _app(
    settings: FrontendSettings, credentials: Credentials, services: Services, responses: ResponseState
) -> AsgiApp:
    keys = credentials.keys
    # A browser wants a certificate to have the name.
    names = ["*"] if settings.authenticates and settings.tls_cert_file else settings.allowed_hosts
    return Guards(
        create_app(services, responses),
        services.metrics,
        keys=None if keys is None else lambda: keys.value,
        origins=settings.cors_origins,
        names=names,
        named_paths=PAGE_PATHS if settings.authenticates else None,
    )


def _services(
    settings: FrontendSettings, seal: Seal, discovery: Discovery, transport: Transport, siblings: Siblings
) -> Services:
    metrics = Metrics()
    metrics.records.delays.start()
    log_requests(metrics, settings.access_log)
    fleet = Fleet(
        discovery,
        transport,
        model_path=settings.model_path,
        aliases=parse_aliases(settings.model_alias),
        no_progress_s=settings.routing.no_progress_s,
        current_date=settings.current_date,
        delays=metrics.records.delays,
        trusted=None if settings.no_check_numbers else read_trusted(settings.trusted_numbers),
    )
    return Services(
        fleet=fleet,
        generator=Generator(transport, fleet, settings.routing, metrics, settings.num_processes),
        metrics=metrics,
        others=siblings.ask,
        thoughts=Thoughts(share=siblings.share),
        seal=seal,
        request_timeout_s=settings.request_timeout_s,
        share_cache=settings.share_cache,
        begin_trace=_begin_trace(settings, metrics),
        has_page=not settings.no_page,
        bodies=Bodies(default_bytes() // settings.num_processes),
    )


def _begin_trace(settings: FrontendSettings, metrics: Metrics) -> BeginTrace | None:
    """Let a thread send spans to the flag's endpoint or the environment's; None without one. Raises
    ValueError if a package is missing."""
    env = os.environ
    named = env.get("OTEL_EXPORTER_OTLP_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    is_off = env.get("OTEL_SDK_DISABLED") == "true" or env.get("OTEL_TRACES_EXPORTER") == "none"
    if not settings.otlp_endpoint and (is_off or not named):
        return None
    try:
        from frontend.traces import Traces
    except ModuleNotFoundError:
        missing = "traces need OpenTelemetry's packages: pip install '.[otel]'"
        if settings.otlp_endpoint:
            raise ValueError(f"--otlp-endpoint: {missing}") from None
        log.warning(missing)  # the variables may be meant for other programs
        return None
    traces = Traces(
        settings.otlp_endpoint, {"server.address": settings.http_host, "server.port": settings.http_port}
    )
    metrics.readers.append(traces.add)
    return traces.begin


async def _open_store(path: str, siblings: Siblings) -> ResponseStore:
    """The store at that path. If the default path is not writable, responses are kept in memory; several
    processes keep in their folder what would be in memory."""
    folder = siblings.folder
    memory = MEMORY if folder is None else str(folder / "responses.sqlite3")
    store = ResponseStore(memory if path == MEMORY else path, address=siblings.address)
    try:
        await store.open()
    except StoreFailure as error:
        if path != FrontendSettings.response_store:
            raise ValueError(f"--response-store: {error.message}") from error
        log.warning("responses are lost when this frontend ends error=%s", error)
        store = ResponseStore(memory, address=siblings.address)
    return store


if __name__ == "__main__":
    end(main(sys.argv[1:]))
