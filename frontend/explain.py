"""`GET /requests`: records of this frontend's processes, each with its verdict."""

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Annotated, Literal

import msgspec

from baton.errors import InvalidRequest
from frontend.record import Record, Records
from frontend.verdict import Usual, Verdict, verdict

MAX_FOUND = 100
_NUM_RECENT = 300
_Limit = Annotated[int, msgspec.Meta(ge=1, le=MAX_FOUND)]


class Find(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Which requests: those with this id, the slowest, the failed, or those that run; `limit` at most."""

    by: Literal["id", "slowest", "failed", "running"]
    request_id: str = ""
    limit: _Limit = MAX_FOUND


class Found(msgspec.Struct, frozen=True, array_like=True):
    """Of one process: what was looked for, and recent requests to compare them with."""

    matches: list[Record]
    recent: list[Record]


class Explained(msgspec.Struct, kw_only=True):
    """A request, and what made it slow or fail; null if no stage is out of line."""

    record: Record
    verdict: Verdict | None


class RequestsBody(msgspec.Struct, kw_only=True):
    """The response of `GET /requests`."""

    requests: list[Explained]


def query_of(fields: Sequence[tuple[str, str]]) -> Find:
    """The query's fields as a Find. Raises InvalidRequest."""
    by, value = fields[0] if len(fields) == 1 else ("", "")
    if by == "id":
        return Find("id", value)
    if (by, value) == ("running", "1"):
        return Find("running")
    try:
        limit = msgspec.convert(value, _Limit, strict=False)
        return Find(msgspec.convert(by, Literal["slowest", "failed"]), limit=limit)
    except msgspec.ValidationError:
        usage = f"Give one of `id=ID`, `slowest=N`, `failed=N` (N from 1 to {MAX_FOUND}) and `running=1`."
        raise InvalidRequest(usage, param=by[:40] or None) from None


def find(records: Records, query: Find) -> Found:
    """What this process has."""
    match query.by:
        case "id":
            matches = records.find(query.request_id, query.limit)
        case "running":
            matches = records.running()
        case "slowest":
            matches = records.slowest(query.limit)
        case "failed":
            matches = records.newest(query.limit, failed=True)
    running = [each.so_far() for each in records.running()[:_NUM_RECENT]]
    found = [each.so_far() if each.duration_s is None else each for each in matches[: query.limit]]
    return Found(found, [*records.newest(_NUM_RECENT), *running])


def explain(query: Find, found: Sequence[Found]) -> RequestsBody:
    """What all processes have found, explained; the slowest first, or the newest, or the longest running."""
    recent = chain.from_iterable(each.recent for each in found)
    usual = Usual(recent, max(_since_s(each.recent) for each in found))
    records = chain.from_iterable(each.matches for each in found)
    order = attrgetter("duration_s" if query.by == "slowest" else "at_s")
    first = sorted(records, key=order, reverse=query.by != "running")[: query.limit]
    return RequestsBody(requests=[Explained(record=each, verdict=verdict(each, usual)) for each in first])


def _since_s(recent: Sequence[Record]) -> float:
    """All requests that have ended since then are in it."""
    ends_s = [each.at_s + (each.duration_s or 0.0) for each in recent if each.now is None]
    return min(ends_s) if len(ends_s) >= _NUM_RECENT else 0.0
