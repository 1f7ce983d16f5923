"""The body of /health: written by the fleet, read by `python -m baton status`."""

import msgspec

from baton.messages import Role


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as /health shows it. `tokens_per_step`: of an answer, with the guesses that were right, when
    the statistics were last read; None without guesses."""

    worker_id: str
    role: Role
    endpoint: str
    model: str
    engine: str
    engine_version: str
    kv_transfer: str
    tokens_per_step: float | None = None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /health. `missing`: what must be started, or become ready, before requests can be served.
    Workers: `warming` ones try their handoffs first, `lost` ones do not respond, `stuck` ones only send
    heartbeats, `refused` ones sent invalid tokens, compute other numbers or have a certificate of another
    authority; `doubts`: workers whose numbers differ, without a majority, or whose contexts do. Pairs: the
    warm-up of `cold_pairs` failed, `refused_pairs` do not match, between `cut_pairs` no KV moved. Stuck
    workers and cut pairs are excluded until a trial succeeds."""

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
    doubts: list[str] = []
