"""The body of /health: written by the fleet, read by `python -m baton status`."""

import msgspec

from baton.messages import Role


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as /health shows it."""

    worker_id: str
    role: Role
    endpoint: str
    model: str
    engine: str
    engine_version: str
    kv_transfer: str


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /health. `missing` says what must be started, or get ready, before a request can be served;
    `warming` are workers that try their handoffs before they get requests, `lost` those that are registered
    and do not answer, `stuck` those that only send heartbeats. In `cold_pairs` that trial failed, of
    `refused_pairs` it is known that it would; over `cut_pairs` no KV moves. Stuck workers and cut pairs are
    not used until a later trial succeeds; `refused` workers sent what no genuine worker sends, or this
    frontend and they do not trust each other's certificates.
    """

    status: str
    endpoints: list[str]
    instances: list[Instance]
    missing: list[str]
    warming: list[str]
    lost: list[str]
    cold_pairs: list[str]
    refused_pairs: list[str]
    cut_pairs: list[str] = []
    stuck: list[str] = []
    refused: list[str] = []
