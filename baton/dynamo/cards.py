"""Dynamo's model cards as Baton's registrations. What cannot be served is registered with its refusal."""

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from baton.discovery import MAX_WORKERS
from baton.dynamo.messages import ModelCard
from baton.messages import UNDECODABLE, Role, WorkerInfo
from baton.model_folder import model_folder

log = logging.getLogger(__name__)

SCHEME = "dynamo:"
"""Addresses are `dynamo:PATH/INSTANCE`; an instance has a new number with each start."""
FOREIGN = "dynamo"
"""The engine of workers that are not Baton's."""
OWN = "baton"
"""The engine-specific field of a card in which a worker of Baton's has its `WorkerInfo`."""
_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "aggregated": Role.DECODE}
MAX_CARD_BYTES = 256 * 1024
MAX_QUEUE_SIZE = 256
"""How many requests may wait for a worker, as with Baton's: Dynamo's engines queue without a limit."""


@lru_cache(MAX_WORKERS)
def worker_of(path: str, instance: int, text: str) -> WorkerInfo | None:
    """The worker that registered this card at `path`; None, with a line in the log, if it is no card."""
    try:
        if len(text) > MAX_CARD_BYTES:
            raise msgspec.ValidationError(f"longer than {MAX_CARD_BYTES} bytes")
        card = msgspec.json.decode(text, type=ModelCard)
        place: dict[str, Any] = {
            "worker_id": f"{card.worker_type}-{instance:x}",
            "incarnation": str(instance),
            "endpoint": f"dyn://{path}",
            "address": f"{SCHEME}{path}/{instance}",
        }
        own = (card.runtime_config.runtime_data or {}).get(OWN)
        info = _dynamos(card, place) if own is None else replace(msgspec.convert(own, WorkerInfo), **place)
    except UNDECODABLE as error:
        log.warning("card=skipped endpoint=%s instance=%x error=%s", path, instance, error)
        return None
    if (info.role, info.model) != (_ROLES.get(card.worker_type or "", Role.DECODE), card.display_name):
        own_words = f"but {info.role} of {info.model} in `{OWN}`"
        refusal = f"its card says {card.worker_type} of {card.display_name}, {own_words}"
        return replace(_dynamos(card, place), refusal=refusal, is_ready=False)
    return info


def _dynamos(card: ModelCard, place: dict[str, Any]) -> WorkerInfo:
    """What the card says, and its place in the registry."""
    # The engine's limit, else the model's: the mocker's is 0.
    config, longest = card.runtime_config, card.architectural_max_context_length or 0
    length = config.context_length or card.context_length or longest
    refusal = ""
    if card.worker_type not in _ROLES:
        refusal = f"its card says worker type {card.worker_type}; must be one of {', '.join(_ROLES)}"
    elif card.model_input != "Tokens":
        refusal = f"its card says model input {card.model_input}; must be Tokens"
    elif card.worker_type == "prefill" and config.disaggregated_endpoint:
        refusal = "its KV is pushed while prefill runs; only engines whose decode pulls it later are served"
    elif length < 2 or length > longest > 0:
        refusal = f"its card says a context of {length} tokens; must be from 2 to the model's {longest}"
    return WorkerInfo(
        role=_ROLES.get(card.worker_type or "", Role.DECODE),
        model=card.display_name,
        model_path=str(_folder(card)),
        context_length=length,
        engine=FOREIGN,
        engine_version="",
        max_batch_size=config.max_num_seqs or None,
        max_queue_size=MAX_QUEUE_SIZE,
        is_ready=not refusal,
        refusal=refusal,
        **place,
    )


def _folder(card: ModelCard) -> Path:
    """Where the tokenizer is: beside the card's file if that is here, else as the model is called."""
    files = [Path(each.path) for each in (card.tokenizer or {}).values() if each.path.startswith("/")]
    if files:
        return files[0].parent
    try:
        return model_folder(Path(card.source_path))
    except ValueError:
        return Path(card.source_path)
