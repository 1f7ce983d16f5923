"""Requests in a frontend's log, as its access log has them: lines of text or of JSON."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from frontend.record import STAGES, Attempt, Leg, Record, Stage

_LINE = re.compile(r"^(\S+) [A-Z]+ frontend\.access request (.*)$")
_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')
_ON_WORKERS = frozenset({"prefill_wait", "prefill", "decode_wait", "kv_move", "transit"})
_OF_CHOICE = frozenset({"queue", "stream"})
_NAMES = {
    "key": "caller",
    "ttft_s": "first_token_s",
    "prompt_tokens": "num_prompt_tokens",
    "cached_tokens": "num_cached_tokens",
    "completion_tokens": "num_completion_tokens",
}
"""What the record calls them."""
Some = TypeVar("Some", Attempt, Leg, Record)


def records_of(lines: Iterable[str]) -> Iterator[Record]:
    """The requests in these lines; what else is in a log is left out."""
    for line in lines:
        with suppress(
            ValueError, KeyError, TypeError, StopIteration
        ):  # it is not a request's, or half of one
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
    stages: dict[Stage, float] = {
        stage: float(fields[f"{stage}_s"]) for stage in STAGES if f"{stage}_s" in fields
    }
    attempts = [_failed(text, fields, stages) for text in str(fields.get("failures", "")).split("; ") if text]
    if int(fields.get("attempts", 0)) > len(attempts):
        attempts.append(_struct(Attempt, fields, stages=_some(stages, _ON_WORKERS), delay_s=0.0))
    leg = _struct(Leg, fields, stages=_some(stages, _OF_CHOICE), attempts=[])
    leg.attempts = attempts
    record = _struct(Record, fields, stages=_some(stages, frozenset(stages) - _ON_WORKERS - _OF_CHOICE))
    record.legs = [leg] if attempts else []
    record.at_s = datetime.fromisoformat(fields["time"]).timestamp() - float(fields["duration_s"])
    return record


def _struct(kind: type[Some], fields: Mapping[str, Any], **more: object) -> Some:
    """Its fields of the line. Raises ValueError."""
    found = {_NAMES.get(name, name): value for name, value in fields.items() if value not in {None, "None"}}
    return msgspec.convert(found | {"at_s": 0.0, "began_s": 0.0} | more, kind, strict=False)


def _failed(text: str, fields: Mapping[str, Any], stages: dict[Stage, float]) -> Attempt:
    """Of `worker_lost prefill-0 prefill 2.004`, whose time is also in the request's stages."""
    code, workers, stage, seconds = text.split(" ")
    prefill, _, decode = (
        workers.partition("->") if stage == "prefill" or "->" in workers else ("", "", workers)
    )
    attempt = Attempt(began_s=0.0, prefill=prefill, decode=decode, outcome=code)
    ended_in: Stage = next(each for each in STAGES if each == stage)
    if ended_in == "stream":
        attempt.num_tokens = int(fields.get("gap_at", 0))
    else:
        attempt.stages[ended_in] = float(seconds)
        stages[ended_in] = max(0.0, stages.get(ended_in, 0.0) - float(seconds))
    attempt.ended_in = ended_in
    return attempt


def _some(stages: Mapping[Stage, float], names: frozenset[str]) -> dict[Stage, float]:
    return {stage: lasted_s for stage, lasted_s in stages.items() if stage in names}
