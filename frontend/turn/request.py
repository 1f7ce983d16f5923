"""What a client asks for, in no API's terms. A `path` names the field of the body that a value came from."""

import msgspec

from frontend.harmony.conversation import Conversation
from frontend.turn.fields import SamplingFields
from frontend.turn.form import CallChoice


class RawPrompts(msgspec.Struct, frozen=True):
    """Prompts that are not rendered and answers that are not parsed: each text, with control tokens by their
    names, or token ids. `shows_special` gives the answers' control tokens by their names, too."""

    prompts: tuple[str | list[int], ...]
    shows_special: bool = False


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request for `num_choices` answers to a prompt, or to each of several.

    `num_bytes` is about the size of the text to render and tokenise. `max_tokens` None is all that the
    context leaves. `stop_strings` end the visible text, which they are no part of; an answer ends before it
    makes more than `max_calls` calls. `logprobs` is how many of the likeliest tokens are given
    for each (None: nothing), `prompt_logprobs` the same for the prompt.
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
    """Where a request comes from, whose it is, and how long it may take."""

    request_id: str
    deadline_s: float
    owner: str = ""
