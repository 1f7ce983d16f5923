"""NIXL's connector in a worker process: what waits to be pulled, and until when."""

import dataclasses
import threading
import time
from typing import Any

_PROCESS = threading.local()  # a core's thread stands for a worker's process


@dataclasses.dataclass
class ConnectorWorker:
    """The state of one GPU worker. `_reqs_to_process` has a request from its first step on, `_reqs_to_send`
    from the step AFTER its last one, in order of expiry."""

    _reqs_to_send: dict[str, float] = dataclasses.field(default_factory=dict)
    _reqs_to_process: set[str] = dataclasses.field(default_factory=set)
    _lease_extension: float = 0.0  # no decode worker of the double sends heartbeats

    def get_finished(self, pulled: set[str]) -> set[str]:
        """Requests whose KV may be freed: pulled, or expired. Stops at the first that has not expired."""
        done = pulled & self._reqs_to_process
        for request_id in done:
            self._reqs_to_send.pop(request_id, None)
        while self._reqs_to_send:
            request_id, expires = next(iter(self._reqs_to_send.items()))
            if time.perf_counter() < expires:
                break
            del self._reqs_to_send[request_id]
            done.add(request_id)
        self._reqs_to_process -= done
        return done


@dataclasses.dataclass
class Connector:
    """The connector of one worker."""

    connector_worker: ConnectorWorker = dataclasses.field(default_factory=ConnectorWorker)


def set_kv_transfer_group(connector: Connector) -> None:
    """In the thread that stands for the worker's process."""
    _PROCESS.connector = connector


def has_kv_transfer_group() -> bool:
    """Whether this process has a connector."""
    return hasattr(_PROCESS, "connector")


def get_kv_transfer_group() -> Any:
    """The connector of this process."""
    return _PROCESS.connector
