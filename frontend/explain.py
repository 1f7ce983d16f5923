"""`GET /requests`: records of this frontend's processes, each with its verdict."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Literal

import msgspec

from baton.errors import InvalidRequest
from frontend.record import Record, Records
from frontend.routing.health import FleetEvent
from frontend.verdict import Typical, Usual, Verdict, verdict

MAX_FOUND = 100
_NUM_RECENT = 300
_USAGE = "Give one of `id=ID`, `slowest=N`, `failed=N` and `running=1`"


class Find(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Which requests: all with the id `value`, so many of the slowest or of the failed, or those that run."""

    by: Literal["id", "slowest", "failed", "running"]
    value: str | int


class Found(msgspec.Struct, frozen=True, array_like=True):
    """Of one process: what was looked for, and recent requests to compare them with."""

    matches: list[Record]
    recent: list[Record]


class Explained(msgspec.Struct, kw_only=True):
    """A request, and what made it slow or fail; null if no stage is out of line."""

    record: Record
    verdict: Verdict | None


class RequestsBody(msgspec.Struct, kw_only=True):
    """The response of `GET /requests`; `usual` is what stages take, `events` what happened to the fleet while
    these requests ran, the newest first."""

    requests: list[Explained]
    usual: Mapping[str, Typical]
    events: list[FleetEvent]


def query_of(fields: Sequence[tuple[str, str]]) -> Find:
    """The query's fields as a Find. Raises InvalidRequest."""
    if len(fields) != 1:
        raise InvalidRequest(f"{_USAGE}.")
    (by, value), *_ = fields
    if by == "id":
        return Find("id", value)
    if (by, value) == ("running", "1"):
        return Find("running", MAX_FOUND)
    if by not in {"slowest", "failed"}:
        raise InvalidRequest(f"{_USAGE}.", param=by[:40])
    if not (value.isascii() and value.isdecimal() and len(value) < 5 and 1 <= int(value) <= MAX_FOUND):
        raise InvalidRequest(f"`{by}` must be a number from 1 to {MAX_FOUND}.", param=by)
    return Find("slowest" if by == "slowest" else "failed", int(value))


def find(records: Records, query: Find) -> Found:
    """What this process has."""
    running = [record.so_far() for record in records.running()[:_NUM_RECENT]]
    match query:
        case Find("slowest", int(limit)):
            matches = records.slowest(limit)
        case Find("failed", int(limit)):
            matches = records.failed(limit)
        case Find("id", str(request_id)):
            found = records.find(request_id)[:MAX_FOUND]
            matches = [each.so_far() if each.duration_s is None else each for each in found]
        case _:
            matches = running[:MAX_FOUND]
    return Found(matches, [*records.newest(_NUM_RECENT), *running])


def explain(query: Find, found: Sequence[Found], events: Sequence[FleetEvent]) -> RequestsBody:
    """What all processes have found, explained; the slowest first, or the newest, or the longest running."""
    usual = Usual(chain.from_iterable(each.recent for each in found))
    records = list(chain.from_iterable(each.matches for each in found))
    if query.by == "slowest":
        records.sort(key=lambda record: -(record.duration_s or 0.0))
    else:
        records.sort(key=lambda record: record.at_s, reverse=query.by != "running")
    records = records[: query.value if isinstance(query.value, int) else MAX_FOUND]
    return RequestsBody(
        requests=[Explained(record=each, verdict=verdict(each, usual)) for each in records],
        usual=usual.typical,
        events=[event for event in events if any(is_during(event, record) for record in records)],
    )


def is_during(event: FleetEvent, record: Record) -> bool:
    """Whether this happened, or lasted, while the request ran."""
    return event.at_s >= record.at_s and event.at_s - (event.lasted_s or 0.0) <= record.ended_s
