"""The API-neutral request. A `path` names the field of the body that a value came from."""

import msgspec

from frontend.harmony.conversation import Conversation
from frontend.turn.fields import SamplingFields
from frontend.turn.form import CallChoice


class RawPrompts(msgspec.Struct, frozen=True):
    """Prompts that are not rendered and whose answers are not parsed: text, with control tokens spelled out,
    or token ids. `shows_special` spells out control tokens in the answers, too."""

    prompts: tuple[str | list[int], ...]
    shows_special: bool = False


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request for `num_choices` answers to each prompt.

    `num_bytes` is the approximate size of the text to render and tokenise. `max_tokens` None means the rest
    of the context. `stop_strings` end the visible text and are not part of it; the answer ends before call
    number `max_calls` + 1. `logprobs` is the number of alternatives given per token (None: no log
    probabilities), `prompt_logprobs` the same for the prompt.
    """

    model: str
    prompt: Conversation | RawPrompts
    path: str
    num_bytes: int
    sampling: SamplingFields
    call_choice: CallChoice = CallChoice()
    max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_choices: int = 1
    stop_strings: tuple[str, ...] = ()
    max_calls: int | None = None


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP request's id, its deadline, and the owner of its API key."""

    request_id: str
    deadline_s: float
    owner: str = ""
