"""The stages of a request, in order: where each runs, what it means if it is out of line, how it is drawn."""

from collections.abc import Mapping
from math import inf
from typing import Literal, NamedTuple

Stage = Literal[
    "read",
    "render",
    "queue",
    "prefill_wait",
    "prefill",
    "decode_wait",
    "kv_move",
    "transit",
    "stream",
    "send",
]


class Rule(NamedTuple):
    """What it means that this is out of line, and what helps; the names in it are of workers. Until enough
    requests have ended `most_s` is allowed, and `per_token_s` of the tokens `by` which it grows. Of a `wait`
    nothing is usual: one that all requests have is out of line too.

    Of a stage, `group` is how the page draws it; those of `client` are the request's, all others of its
    attempts. It runs on the worker of role `on`, or on the other one if that did both."""

    cause: str
    help: str
    group: Literal["", "client", "wait", "compute", "move", "transit", "stream"] = ""
    on: Literal["", "prefill", "decode"] = ""
    by: Literal["", "computed", "generated"] = ""
    per_token_s: float = 0.0
    most_s: float = 0.5


_MORE = "another worker, or larger batches"
HOST = "a look at the host of {worker}: CPU, swap, network"
LINK = "a look at the network between them"

STAGES: Mapping[Stage, Rule] = {
    "read": Rule("the client sent its body slowly", "a faster client, or a smaller body", "client"),
    "render": Rule("the prompt was long to render and tokenize", "a shorter prompt, or more CPU", "client"),
    "queue": Rule("all workers were busy", _MORE, "wait"),
    "prefill_wait": Rule("{worker} was busy with other prompts", _MORE, "wait", "prefill"),
    "prefill": Rule(
        "{worker} computed the prompt or a grammar slowly", HOST, "compute", "prefill", "computed", 5e-4, 1.0
    ),
    "decode_wait": Rule("{worker} was full", _MORE, "wait", "decode"),
    "kv_move": Rule("KV moved slowly from {prefill} to {decode}", LINK, "move", "decode", "computed", 1e-4),
    "transit": Rule("{worker} stood still, or the network to it", HOST, "transit", "decode"),
    "stream": Rule("{worker} sent its tokens slowly", _MORE, "stream", "decode", "generated", inf, inf),
    "send": Rule("the client did not read what was sent", "a faster client or network", "client"),
}
"""See the glossary."""
