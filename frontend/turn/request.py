"""One request, independent of the API: its prompt, then its sampling, then the requests to workers."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from msgspec.structs import replace

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest, Guided, Sampling
from frontend.harmony.conversation import Conversation
from frontend.harmony.parse import HarmonyParser
from frontend.harmony.render import render
from frontend.text.tokenizer import ModelTokenizer, ServedModel, TooManyTokens
from frontend.turn.choice import Choice, RawText
from frontend.turn.fields import CommonFields, Nvext, first_given
from frontend.turn.ids import new_seed
from frontend.turn.thoughts import Thoughts

_SEED_MASK = 2**63 - 1


class RawPrompts(msgspec.Struct, frozen=True):
    """Prompts that are not rendered and whose answers are not parsed: text, with control tokens spelled out,
    or token ids. `shows_special` spells out control tokens in the answers, too."""

    prompts: tuple[str | list[int], ...]
    shows_special: bool = False


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request for `num_choices` answers to each prompt, which the field at `path` contains. `form`: see
    `demanded`. `num_bytes` is the approximate size of the text to render and tokenise. The answer ends where
    the context does, and before a string of `stop` or call number `max_calls` + 1."""

    fields: CommonFields
    prompt: Conversation | RawPrompts
    path: str
    num_bytes: int
    form: Guided | None = None
    max_tokens: int | None = None
    num_choices: int | None = None
    stop: str | Sequence[str] | None = None
    max_calls: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class Client(msgspec.Struct, frozen=True, kw_only=True):
    """The client of one HTTP request: the request's id, its deadline, the owner of its API key, and the
    client's address. `key_name` is that of the key, empty if keys are not checked: stored responses belong to
    it, and so does cached KV, unless the key `shares_cache`."""

    request_id: str
    deadline_s: float
    owner: str = ""
    address: str = ""
    key_name: str = ""
    shares_cache: bool = False
    trace_headers: dict[str, str] | None = None

    def caller(self, user: str | None) -> str:
        """Whose requests take turns with others' at full workers: a key and a user, or an address."""
        return f"{self.owner} {user or ''}" if self.owner or user else self.address


# Prompt log probabilities travel in one worker message, and NATS limits those to 1 MB.
MAX_SCORED_TOKENS = 8192
# Longer prompts are rendered and tokenised in a thread, so that running streams do not stall.
LONG_BYTES = 8192


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt's tokens, and how many are before the first answer. `current_date` is the conversation's."""

    token_ids: list[int]
    num_opening_tokens: int = 0
    current_date: str | None = None


async def encode(request: TurnRequest, owner: str, served: ServedModel, thoughts: Thoughts) -> list[Prompt]:
    """Each prompt of a request, as `encode_prompt` makes them, in a thread if they are long."""
    encode_now = partial(encode_prompt, request.prompt, request.path, owner, served, thoughts)
    return await asyncio.to_thread(encode_now) if request.num_bytes > LONG_BYTES else encode_now()


def encode_prompt(
    prompt: Conversation | RawPrompts, path: str, owner: str, served: ServedModel, thoughts: Thoughts
) -> list[Prompt]:
    """The prompt of a conversation, or each raw prompt, in the field `path`. Raises InvalidRequest if it
    cannot be rendered, ContextTooLong if it is too long to be counted."""
    tokenizer, limit = served.tokenizer, served.max_counted_tokens
    try:
        if isinstance(prompt, Conversation):
            conversation = thoughts.resumed(owner, prompt, served.current_date)
            ids, num_opening = tokenizer.encode_segments(render(conversation), limit)
            date = conversation.current_date
            return [Prompt(token_ids=ids, num_opening_tokens=num_opening, current_date=date)]
        return [
            Prompt(
                token_ids=tokenizer.encode_text(each, allow_special=True, limit=limit)
                if isinstance(each, str)
                else tokenizer.checked(each, served.name, path)
            )
            for each in prompt.prompts
        ]
    except TooManyTokens:
        raise served.too_long(path) from None


def sampling_of(request: TurnRequest, served: ServedModel, num_prompt_tokens: int) -> Sampling:
    """The request's sampling after a prompt of that length, with the model's stop tokens. Raises
    ContextTooLong, or InvalidRequest if fields contradict each other or name unknown token ids."""
    fields, nvext = request.fields, request.fields.nvext or Nvext()
    max_tokens = _max_tokens(request, served, num_prompt_tokens)
    # `top_p` 0 means greedy sampling, but engines reject the value 0.
    greedy = fields.top_p == 0 or nvext.greed_sampling
    check, name = served.tokenizer.checked, served.name
    logit_bias = {int(token_id): value for token_id, value in (fields.logit_bias or {}).items()}
    check(list(logit_bias), name, "logit_bias")
    own = check(fields.stop_token_ids or [], name, "stop_token_ids")
    return Sampling(
        max_tokens=max_tokens,
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
        logit_bias=logit_bias,
        stop_token_ids=tuple(dict.fromkeys((*served.tokenizer.stop_token_ids, *own))),
        ignore_eos=fields.ignores_eos,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        guided=request.form,
    )


def _max_tokens(request: TurnRequest, served: ServedModel, num_prompt_tokens: int) -> int:
    path, least = request.path, request.fields.min_tokens or 0
    if request.prompt_logprobs is not None and num_prompt_tokens > MAX_SCORED_TOKENS:
        raise InvalidRequest.at(
            path,
            f"has {num_prompt_tokens} tokens; log probabilities are limited to prompts of "
            f"{MAX_SCORED_TOKENS} tokens.",
        )
    room = served.context_length - num_prompt_tokens
    if room < 1:
        raise served.too_long(path, num_prompt_tokens)
    limit = min(request.max_tokens or room, room)
    if least > limit:
        raise InvalidRequest.at("min_tokens", f"is {least}, but the answer is limited to {limit} tokens.")
    return limit


async def prepare(
    request: TurnRequest,
    client: Client,
    served: ServedModel,
    thoughts: Thoughts,
    check_load: Callable[[str, str, float], None],
    *,
    max_choices: int,
) -> list[Choice]:
    """The choices, prompt by prompt, ready to be generated; `thoughts` keeps their answers. Raises a
    BatonError for requests that cannot be served; `check_load` (`Generator.check`) before work is spent."""
    fields, num = request.fields, request.num_choices or 1
    total = num * (len(request.prompt.prompts) if isinstance(request.prompt, RawPrompts) else 1)
    if total > max_choices:
        raise InvalidRequest.at("n", f"makes {total} choices; at most {max_choices} are allowed.")
    caller = client.caller(fields.safety_identifier or fields.user)
    check_load(served.name, caller, client.deadline_s)
    prompts = await encode(request, client.owner, served, thoughts)
    sampling = sampling_of(request, served, max(len(prompt.token_ids) for prompt in prompts))
    keep = partial(_keep, thoughts, client.owner, prompts[0].current_date)
    # No key learns what another's prompts have in common with its own. Names of keys have no slash.
    is_own = client.key_name and not client.shares_cache
    salt = f"{client.key_name}/{fields.cache_salt or ''}" if is_own else fields.cache_salt or ""
    requests = [
        GenerateRequest(
            # Workers need unique ids.
            request_id=client.request_id if total == 1 else f"{client.request_id}-{i}",
            model=served.name,
            token_ids=prompts[i // num].token_ids,
            num_opening_tokens=prompts[i // num].num_opening_tokens,
            sampling=replace(sampling, choice=i % num),
            deadline_s=client.deadline_s,
            priority=fields.priority or 0,
            cache_salt=salt,
            trace_headers=client.trace_headers,
        )
        for i in range(total)
    ]
    return [_choice(each, request, served.tokenizer, caller=caller, on_finish=keep) for each in requests]


def _choice(
    token_request: GenerateRequest,
    request: TurnRequest,
    tokenizer: ModelTokenizer,
    *,
    caller: str,
    on_finish: Callable[[Choice], None],
) -> Choice:
    prompt, stop = request.prompt, request.stop or ()
    stops = (stop,) if isinstance(stop, str) else stop
    choice = partial(Choice, token_request, stop_strings=stops, caller=caller, on_finish=on_finish)
    if isinstance(prompt, RawPrompts):  # any stop token is left out of the text
        reader = RawText(tokenizer, shows_special=prompt.shows_special)
        return choice(reader, tokenizer, cut_ids=token_request.sampling.stop_token_ids)
    offered = frozenset(tool.called for tool in prompt.tools)
    parser = HarmonyParser(tokenizer.vocabulary, offered, may_call=bool(offered))
    # The parser consumes the model's own stop tokens.
    cut_ids = request.fields.stop_token_ids or ()
    return choice(parser, tokenizer, max_calls=request.max_calls, cut_ids=cut_ids, tools=prompt.tools)


def _keep(thoughts: Thoughts, owner: str, current_date: str | None, choice: Choice) -> None:
    thoughts.keep(owner, choice.call_ids, replace(choice.written(), current_date=current_date))
