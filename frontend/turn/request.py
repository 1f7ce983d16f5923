"""The API-neutral request, and the client that makes it. A `path` names a field of the body."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from baton.errors import InvalidRequest
from baton.messages import Guided, Sampling
from frontend.harmony.conversation import Conversation, Tool
from frontend.turn.fields import TEXT_TYPES, CommonFields, Nvext, Part, first_given, required
from frontend.turn.form import CallChoice, demanded_format, guided, raw_guided
from frontend.turn.ids import new_seed

TEXT = {"type": "string"}
TEXTS = {"type": "array", "items": TEXT}
NUMBER = {"type": "integer"}
REST_OF_CONTEXT = 2**31 - 1
"""`max_tokens` of an answer that may fill the context."""
_SEED_MASK = 2**63 - 1


def left_out(kind: str) -> str:
    """What the prompt says instead of content of this kind, such as an image."""
    return f"[{kind[:40]} left out: this model reads text only]"


class ClientTool(msgspec.Struct, frozen=True):
    """A tool that an API defines and the client runs, such as `shell`: a function for the model. `properties`
    are the schemas of its arguments, which are enforced."""

    description: str
    properties: Mapping[str, object]
    required: Sequence[str]

    def function(self, name: str, path: str) -> Tool:
        """The function of that name."""
        parameters = {"type": "object", "properties": self.properties, "required": self.required}
        return Tool(name=name, description=self.description, parameters=parameters, strict=True, path=path)


def text_of_part(part: Part, path: str) -> str | None:
    """The text of a content part, None if it has none. Raises InvalidRequest if its field is missing."""
    if part.type not in TEXT_TYPES:
        return None
    if part.type == "refusal":
        return required(part.refusal, f"{path}.refusal")
    return required(part.text, f"{path}.text")


class RawPrompts(msgspec.Struct, frozen=True):
    """Prompts that are not rendered and whose answers are not parsed: text, with control tokens spelled out,
    or token ids. `shows_special` spells out control tokens in the answers, too."""

    prompts: tuple[str | list[int], ...]
    shows_special: bool = False


class Limits(NamedTuple):
    """What a body asks of its answer: see `TurnRequest` and `Sampling`. `stop` is one string or several."""

    max_tokens: int | None = None
    num_choices: int = 1
    stop: str | list[str] | None = None
    max_calls: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request for `num_choices` answers to each prompt.

    `num_bytes` is the approximate size of the text to render and tokenise. `sampling` has the client's stop
    tokens only, and a limit that the context may lower. `stop_strings` end the visible text and are not part
    of it; the answer ends before call number `max_calls` + 1. `user` is the client's, if it names one.
    """

    model: str
    prompt: Conversation | RawPrompts
    path: str
    num_bytes: int
    sampling: Sampling
    num_choices: int = 1
    stop_strings: tuple[str, ...] = ()
    max_calls: int | None = None
    user: str | None = None
    priority: int = 0
    cache_salt: str = ""

    @classmethod
    def of(
        cls,
        fields: CommonFields,
        prompt: Conversation | RawPrompts,
        limits: Limits,
        choice: CallChoice | None = None,
        *,
        path: str,
        num_bytes: int,
    ) -> "TurnRequest":
        """The request of a body of `num_bytes` whose prompt is at `path`. Raises InvalidRequest for fields
        that contradict each other, and as `guided` does."""
        if isinstance(prompt, RawPrompts):
            form = raw_guided(demanded_format(fields))
        else:
            form = guided(prompt.tools, choice, demanded_format(fields, prompt.answer_format))
        return cls(
            model=fields.model,
            prompt=prompt,
            path=path,
            num_bytes=num_bytes,
            sampling=_sampling(fields, limits, form),
            num_choices=limits.num_choices,
            stop_strings=(limits.stop,) if isinstance(limits.stop, str) else tuple(limits.stop or ()),
            max_calls=limits.max_calls,
            user=fields.safety_identifier or fields.user,
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt or "",
        )


def _sampling(fields: CommonFields, limits: Limits, form: Guided | None) -> Sampling:
    nvext = fields.nvext or Nvext()
    # `top_p` 0 means greedy sampling, but engines reject the value 0.
    greedy = fields.top_p == 0 or nvext.greed_sampling
    ignore_eos = first_given(nvext.ignore_eos, fields.ignore_eos, default=False)
    if form is not None and ignore_eos:
        raise InvalidRequest(
            "`ignore_eos` cannot be combined with an output format, strict tools or a required tool call.",
            param="ignore_eos",
        )
    return Sampling(
        max_tokens=limits.max_tokens or REST_OF_CONTEXT,
        min_tokens=fields.min_tokens or 0,
        seed=new_seed() if fields.seed is None else fields.seed & _SEED_MASK,
        is_seeded=fields.seed is not None,
        temperature=0.0 if greedy else first_given(fields.temperature, default=1.0),
        top_p=fields.top_p or 1.0,
        top_k=max(0, first_given(nvext.top_k, fields.top_k, default=0)),
        min_p=fields.min_p or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        repetition_penalty=first_given(nvext.repetition_penalty, fields.repetition_penalty, default=1.0),
        logit_bias={int(name): value for name, value in (fields.logit_bias or {}).items()},
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=ignore_eos,
        logprobs=limits.logprobs,
        prompt_logprobs=limits.prompt_logprobs,
        guided=form,
    )


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """The client of one HTTP request: the request's id, its deadline, the owner of its API key, and the
    client's address. `key_name` is that of the key, empty if keys are not checked: stored responses belong to
    it, and so does cached KV, unless the key `shares_cache`.
    """

    request_id: str
    deadline_s: float
    owner: str = ""
    address: str = ""
    key_name: str = ""
    shares_cache: bool = False

    def cache_salt(self, given: str) -> str:
        """The client's salt, with its key's name: no key learns what another's prompts have in common with
        its own. Names of keys have no slash."""
        return f"{self.key_name}/{given}" if self.key_name and not self.shares_cache else given

    def caller(self, user: str | None) -> str:
        """Whose requests take turns with others' at full workers: a key and a user, or an address."""
        return f"{self.owner} {user or ''}" if self.owner or user else self.address
