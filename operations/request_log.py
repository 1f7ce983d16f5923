"""Requests in a frontend's log, as its access log has them: lines of text or of JSON."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

import msgspec

from frontend.access import FIELDS
from frontend.record import STAGES, Attempt, Record, Stage

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
