"""The API-neutral request. A `path` names the field of the body that a value came from."""

import msgspec

from frontend.harmony.conversation import Conversation
from frontend.turn.fields import SamplingFields
from frontend.turn.form import CallChoice


def left_out(kind: str) -> str:
    """What the prompt says instead of content of this kind, such as an image."""
    return f"[{kind[:40]} left out: this model reads text only]"


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
    probabilities), `prompt_logprobs` the same for the prompt. `user` is the client's, if it names one.
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
    user: str | None = None


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP request's id, its deadline, the owner of its API key, and the client's address. `key_name` is
    that of the key, empty if keys are not checked: stored responses belong to it, and so does cached KV,
    unless the key `shares_cache`.
    """

    request_id: str
    deadline_s: float
    owner: str = ""
    address: str = ""
    key_name: str = ""
    shares_cache: bool = False

    def cache_salt(self, given: str | None) -> str:
        """The client's salt, which is its key's own: no key learns what another's prompts have in common with
        its own. Names of keys have no slash."""
        return f"{self.key_name}/{given or ''}" if self.key_name and not self.shares_cache else given or ""

    def caller(self, user: str | None) -> str:
        """Who takes turns with others when workers are full: a key and a user, or an address."""
        return f"{self.owner} {user or ''}" if self.owner or user else self.address
