"""`python -m baton why ID`: the stages of a request, which is out of line, what would have helped."""

import dataclasses
import json
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from baton.flags import Parsed, flag
from frontend.access import FIELDS, SLOW_S
from frontend.record import STAGES, Attempt, Leg, Record, Records, Stage
from frontend.verdict import MAX_FOUND, Explained, Found, RequestsBody, Verdict, explain, find, query_of
from operations.client import Client, FrontendFlags
from operations.errors import CommandError, FrontendError, printable

_TIMEOUT_S = 10.0
_NONE = {"id": "of the newest, slowest and failed ones has this id", "slowest": "has ended"}
_NONE |= {"failed": "has failed", "running": "is running"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WhySettings(FrontendFlags):
    """Flags of `python -m baton why`."""

    request_id: str = flag("", "the request's x-request-id", metavar="ID", is_positional=True)
    slowest: int | None = flag(None, "slowest of the last hour", metavar="N", at_least=1, at_most=MAX_FOUND)
    failed: bool = flag(False, "the newest that failed or were retried")
    running: bool = flag(False, "those that run now, the longest first")
    log: Path | None = flag(None, "read a frontend's log (best with --access-log all)", metavar="FILE")
    json: bool = flag(False, "JSON instead of text")


def why(parsed: Parsed[WhySettings]) -> int:
    """Explain requests. Raises CommandError, with exit status 1 if none is found or the key is refused."""
    settings = parsed.settings
    by, value = _query(settings)
    found = _read(settings.log, by, value) if settings.log else _ask(Client(settings), by, value)
    if settings.json:
        sys.stdout.write(f"{msgspec.json.encode(found).decode()}\n")
        return int(not found.requests)
    if not found.requests:
        raise CommandError(f"no request {_NONE[by]}", exit_status=1)
    sys.stdout.write("\n\n".join(map(text, found.requests)) + "\n")
    return 0


def _query(settings: WhySettings) -> tuple[str, str]:
    """The query of `GET /requests`. Raises CommandError, unless one of them is given."""
    given = {"id": settings.request_id, "slowest": settings.slowest}
    given |= {"failed": settings.failed and MAX_FOUND, "running": settings.running and 1}
    found = [(by, f"{value}") for by, value in given.items() if value]
    if len(found) != 1 or (settings.log and settings.running):
        raise CommandError("give one of: a request's ID, --slowest N, --failed, --running (not with --log)")
    return found[0]


def _ask(client: Client, by: str, value: str) -> RequestsBody:
    path = f"/requests?{by}={quote(value, safe='', errors='replace')}"
    try:
        return client.get(path, RequestsBody, _TIMEOUT_S)
    except FrontendError as error:
        error.exit_status = 1 if error.status else 2
        raise


def _read(path: Path, by: str, value: str) -> RequestsBody:
    """What the log has, as a frontend would explain it. Slow requests are compared with no more than running
    ones: by default the log has no others."""
    query, records, same_id = query_of([(by, value)]), Records(), deque[Record](maxlen=MAX_FOUND)
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for record in records_of(lines):
                records.keep(record)
                if record.request_id == query.request_id:
                    same_id.append(record)
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from error
    found = find(records, query)
    recent = [replace(each, status=0) if (each.duration_s or 0.0) > SLOW_S else each for each in found.recent]
    return explain(query, [Found(list(same_id) if query.by == "id" else found.matches, recent)])


def text(explained: Explained) -> str:
    """The lines on one request."""
    lines = [*_timeline(explained.record), *_conclusion(explained.verdict)]
    return "\n".join(printable(line) for line in lines if line.strip())


def _timeline(record: Record) -> Iterator[str]:
    arrived = datetime.fromtimestamp(record.at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    end = record.code or ("the client left" if record.disconnected else "")
    status = f"{record.status} {end}".strip() if record.status else f"running, now in {record.now}"
    first = "" if record.first_token_s is None else f", first token after {_time(record.first_token_s)}"
    caller = f", key {record.caller}" if record.caller else ""
    yield f"{record.request_id}  {status}  {_time(record.duration_s or 0.0)}{first}"
    yield f"  {arrived}, {record.route}{caller}, {record.num_prompt_tokens:,} prompt tokens"
    yield f"  {_stages(record.stages, STAGES.keys() - {'send'})}"
    for number, leg in enumerate(record.legs):
        if len(record.legs) > 1:
            yield f"  choice {number}"
        yield from _leg(leg, record)
    yield f"  {_stages(record.stages, {'send'})}"


def _leg(leg: Leg, record: Record) -> Iterator[str]:
    for number, attempt in enumerate(leg.attempts, 1):
        both = ((attempt.prefill, attempt.prefill_at), (attempt.decode, attempt.decode_at))
        workers = " -> ".join(f"{name} ({at})" if at else name for name, at in both if name)
        tokens = f" after {attempt.num_tokens} tokens" if attempt.num_tokens else ""
        how = f"  <-- {attempt.outcome or 'no answer'} in {attempt.ended_in}{tokens}"
        end = how if attempt.ended_in else ""
        on = f"attempt {number} {workers}" if workers else "no worker"
        yield f"  {on}: {_stages(attempt.stages, STAGES.keys())}{end}"
    gap = f", longest gap {_time(leg.gap_s)} after token {leg.gap_at}" if leg.gap_at else ""
    yield f"  {record.num_completion_tokens:,} tokens{gap}"


def _stages(stages: Mapping[Stage, float], names: Set[Stage]) -> str:
    return " | ".join(f"{name} {_time(stages[name])}" for name in STAGES if name in stages.keys() & names)


def _time(lasted_s: float) -> str:
    return f"{lasted_s:.2f} s" if lasted_s >= 1 else f"{lasted_s * 1000:.0f} ms"


def _conclusion(found: Verdict | None) -> Iterator[str]:
    if found is None:
        yield "  no stage is out of line"
        return
    where = f" on {found.worker}" if found.worker else ""
    crowd = f", most of the time with requests of {found.crowd}" if found.crowd else ""
    longer = f", {_time(found.excess_s)} longer than usual" if found.excess_s else ""
    yield f"  {'slow' if longer else 'failed'} stage: {found.stage}{where}{longer}: {found.cause}{crowd}"
    yield f"  what would have helped: {found.help}"


_LINE = re.compile(r"^(\S+) [A-Z]+ frontend\.access request (.*)$")
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')


def records_of(lines: Iterable[str]) -> Iterator[Record]:
    """The requests in these lines; what else is in a log is left out."""
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, StopIteration):  # no request's, or half a line
            if fields := _fields(line.strip()):
                yield _record(fields)


def _fields(line: str) -> Mapping[str, Any]:
    if line.startswith("{"):
        found: dict[str, Any] = json.loads(line)
        return found if found.get("logger") == "frontend.access" and found["message"] == "request" else {}
    match = _LINE.match(line)
    if match is None:
        return {}
    pairs = _FIELD.findall(match[2])
    return {"time": match[1]} | {name: json.loads(text) if text[0] == '"' else text for name, text in pairs}


def _record(fields: Mapping[str, Any]) -> Record:
    stages = {stage: float(fields[f"{stage}_s"]) for stage in STAGES if f"{stage}_s" in fields}
    own = {stage: stages.pop(stage) for stage in [*stages] if STAGES[stage].group == "client"}
    failed = [_failed(text, fields, stages) for text in str(fields.get("failures", "")).split("; ") if text]
    record, leg, last = (
        {attribute: fields[name] for name, attribute in names.items() if name in fields} for names in FIELDS
    )
    if int(fields["attempts"]) == len(failed):  # the last one waited
        last = {}
    attempts = [*failed, msgspec.convert(last | {"stages": stages}, Attempt, strict=False)]
    at_s = datetime.fromisoformat(fields["time"]).timestamp() - float(fields["duration_s"])
    found = {"at_s": at_s, "began_s": 0.0, "stages": own, "legs": [leg | {"attempts": attempts}]}
    return msgspec.convert(record | found, Record, strict=False)


def _failed(text: str, fields: Mapping[str, Any], stages: dict[Stage, float]) -> Attempt:
    """Of `worker_lost prefill-0 prefill 2.004`, whose time is also in the request's stages."""
    code, workers, stage, seconds = text.split(" ")
    first, _, second = workers.partition("->")
    names = (first, second) if second or stage == "prefill" else ("", first)
    ended_in: Stage = next(each for each in STAGES if each == stage)
    attempt = Attempt(prefill=names[0], decode=names[1], outcome=code, ended_in=ended_in)
    if ended_in == "stream":
        attempt.num_tokens = int(fields.get("gap_at", 0))
    else:
        attempt.stages[ended_in] = float(seconds)
        stages[ended_in] = max(0.0, stages.get(ended_in, 0.0) - float(seconds))
    return attempt
