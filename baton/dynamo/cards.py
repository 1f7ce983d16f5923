"""Dynamo's model cards as Baton's registrations. What cannot be served is registered with its refusal."""

import logging
from functools import lru_cache
from pathlib import Path

import msgspec

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
    """The worker that registered this card at the endpoint `path`; None, with a line in the log, if the text
    is not a card.
    """
    try:
        if len(text) > MAX_CARD_BYTES:
            raise msgspec.ValidationError(f"longer than {MAX_CARD_BYTES} bytes")
        card = msgspec.json.decode(text, type=ModelCard)
        own = (card.runtime_config.runtime_data or {}).get(OWN)
        known = None if own is None else msgspec.convert(own, WorkerInfo)
    except UNDECODABLE as error:
        log.warning("card=skipped endpoint=%s instance=%x error=%s", path, instance, error)
        return None
    role = _ROLES.get(card.worker_type or "", Role.DECODE)
    worker_id, address = f"{card.worker_type}-{instance:x}", f"{SCHEME}{path}/{instance}"
    if known is not None and known.role is role and known.model == card.display_name:
        return msgspec.structs.replace(
            known, worker_id=worker_id, incarnation=str(instance), endpoint=f"dyn://{path}", address=address
        )
    refusal = _refusal(card)
    if known is not None:
        own_words = f"{known.role} of {known.model}"
        refusal = f"its card says {card.worker_type} of {card.display_name}, but {own_words} in `{OWN}`"
    return WorkerInfo(
        worker_id=worker_id,
        incarnation=str(instance),
        role=role,
        endpoint=f"dyn://{path}",
        model=card.display_name,
        model_path=str(_folder(card)),
        address=address,
        context_length=_context_length(card),
        engine=FOREIGN,
        engine_version="",
        max_batch_size=card.runtime_config.max_num_seqs or None,
        max_queue_size=MAX_QUEUE_SIZE,
        is_ready=not refusal,
        refusal=refusal,
    )


def _refusal(card: ModelCard) -> str:
    """Why this worker cannot be served; empty if it can."""
    longest, asked = card.architectural_max_context_length or 0, _context_length(card)
    if card.worker_type not in _ROLES:
        return f"its card says worker type {card.worker_type}; must be one of {', '.join(_ROLES)}"
    if card.model_input != "Tokens":
        return f"its card says model input {card.model_input}; must be Tokens"
    if card.worker_type == "prefill" and card.runtime_config.disaggregated_endpoint:
        return "its KV is pushed while prefill runs; only engines whose decode pulls it later are served"
    if asked < 2 or asked > longest > 0:
        return f"its card says a context of {asked} tokens; must be from 2 to the model's {longest}"
    return ""


def _context_length(card: ModelCard) -> int:
    """The engine's limit, else the model's: the mocker's is 0."""
    engines = card.runtime_config.context_length or card.context_length
    return engines or card.architectural_max_context_length or 0


def _folder(card: ModelCard) -> Path:
    """Where the tokenizer is: beside the card's file if that is here, else as the model is called."""
    files = [Path(each.path) for each in (card.tokenizer or {}).values() if each.path.startswith("/")]
    if files:
        return files[0].parent
    try:
        return model_folder(Path(card.source_path))
    except ValueError:
        return Path(card.source_path)
