"""One request, independent of the API: its form and sampling, its prompt, and the requests to workers."""

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec
from msgspec.structs import replace

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest, Guided, Sampling
from frontend.harmony.conversation import Conversation
from frontend.harmony.parse import HarmonyParser
from frontend.harmony.render import render
from frontend.text.tokenizer import ContextTooLong, ModelTokenizer, ServedModel, TooManyTokens
from frontend.turn.choice import Choice, RawText
from frontend.turn.fields import CommonFields, Nvext, first_given
from frontend.turn.form import CallChoice, demanded
from frontend.turn.ids import new_seed
from frontend.turn.thoughts import Thoughts

REST_OF_CONTEXT = 2**31 - 1
"""`max_tokens` of an answer that may fill the context."""
_SEED_MASK = 2**63 - 1


class RawPrompts(msgspec.Struct, frozen=True):
    """Prompts that are not rendered and whose answers are not parsed: text, with control tokens spelled out,
    or token ids. `shows_special` spells out control tokens in the answers, too."""

    prompts: tuple[str | list[int], ...]
    shows_special: bool = False


class TurnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request for `num_choices` answers to each prompt.

    `num_bytes` is the approximate size of the text to render and tokenise. `sampling` has the client's stop
    tokens only, and a limit that the context may lower. `stop_strings` end the visible text and are not part
    of it; the answer ends before call number `max_calls` + 1. `user` is the client's, if it names one."""

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
        choice: CallChoice | None = None,
        *,
        path: str,
        num_bytes: int,
        max_tokens: int | None = None,
        num_choices: int | None = None,
        stop: str | list[str] | None = None,
        max_calls: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> "TurnRequest":
        """The request of a body of `num_bytes` whose prompt is at `path`. Raises InvalidRequest for fields
        that contradict each other, and as `guided` does."""
        conversation = prompt if isinstance(prompt, Conversation) else None
        form = demanded(fields, conversation, choice)
        sampling = _sampling(fields, form, max_tokens or REST_OF_CONTEXT)
        return cls(
            model=fields.model,
            prompt=prompt,
            path=path,
            num_bytes=num_bytes,
            sampling=replace(sampling, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
            num_choices=num_choices or 1,
            stop_strings=(stop,) if isinstance(stop, str) else tuple(stop or ()),
            max_calls=max_calls,
            user=fields.safety_identifier or fields.user,
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt or "",
        )


def _sampling(fields: CommonFields, form: Guided | None, max_tokens: int) -> Sampling:
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
        logit_bias={int(name): value for name, value in (fields.logit_bias or {}).items()},
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        ignore_eos=ignore_eos,
        guided=form,
    )


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


def fitted(request: TurnRequest, served: ServedModel, *, num_prompt_tokens: int) -> Sampling:
    """The request's sampling for a prompt of that length, with the model's stop tokens; `max_tokens` is
    capped by the rest of the context.

    Raises ContextTooLong if the prompt fills the context, InvalidRequest if the fields contradict each other
    or name unknown token ids."""
    sampling, tokenizer, path = request.sampling, served.tokenizer, request.path
    if sampling.prompt_logprobs is not None and num_prompt_tokens > MAX_SCORED_TOKENS:
        raise InvalidRequest(
            f"`{path}` has {num_prompt_tokens} tokens; log probabilities are limited to prompts of "
            f"{MAX_SCORED_TOKENS} tokens.",
            param=path,
        )
    room = served.context_length - num_prompt_tokens
    if room < 1:
        raise ContextTooLong(
            f"This model's maximum context length is {served.context_length} tokens, but `{path}` "
            f"has {num_prompt_tokens} tokens. Shorten it to leave room for the answer.",
            param=path,
        )
    limit = min(sampling.max_tokens, room)
    if sampling.min_tokens > limit:
        raise InvalidRequest(
            f"`min_tokens` is {sampling.min_tokens}, but the answer is limited to {limit} tokens.",
            param="min_tokens",
        )
    tokenizer.checked(list(sampling.logit_bias), served.name, "logit_bias")
    own = tokenizer.checked(list(sampling.stop_token_ids), served.name, "stop_token_ids")
    stops = tuple(dict.fromkeys((*tokenizer.stop_token_ids, *own)))
    return replace(sampling, max_tokens=limit, stop_token_ids=stops)


async def prepare(
    request: TurnRequest,
    client: Client,
    served: ServedModel,
    thoughts: Thoughts,
    check_load: Callable[[str, str, float], None],
    *,
    max_choices: int,
) -> list[Choice]:
    """The choices, prompt by prompt, ready to be generated. Reasoning that the client did not send back with
    its calls is restored from `thoughts`, and new reasoning is kept there. Raises a BatonError for requests
    that cannot be served; `check_load` is `Generator.check`, before work is spent on the prompt."""
    num = request.num_choices
    total = num * (len(request.prompt.prompts) if isinstance(request.prompt, RawPrompts) else 1)
    if total > max_choices:
        raise InvalidRequest(f"`n` makes {total} choices; at most {max_choices} are allowed.", param="n")
    caller = client.caller(request.user)
    check_load(served.name, caller, client.deadline_s)
    prompts = await encode(request, client.owner, served, thoughts)
    sampling = fitted(request, served, num_prompt_tokens=max(len(prompt.token_ids) for prompt in prompts))
    keep = partial(_keep, thoughts, client.owner, prompts[0].current_date, served.tokenizer)
    # No key learns what another's prompts have in common with its own. Names of keys have no slash.
    is_own = client.key_name and not client.shares_cache
    salt = f"{client.key_name}/{request.cache_salt}" if is_own else request.cache_salt
    requests = [
        GenerateRequest(
            # Workers need unique ids.
            request_id=client.request_id if total == 1 else f"{client.request_id}-{i}",
            model=served.name,
            token_ids=prompts[i // num].token_ids,
            num_opening_tokens=prompts[i // num].num_opening_tokens,
            sampling=replace(sampling, choice=i % num),
            deadline_s=client.deadline_s,
            priority=request.priority,
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
    prompt, stop_strings = request.prompt, request.stop_strings
    choice = partial(Choice, token_request, stop_strings=stop_strings, caller=caller, on_finish=on_finish)
    if isinstance(prompt, RawPrompts):  # any stop token is left out of the text
        reader = RawText(tokenizer, shows_special=prompt.shows_special)
        return choice(reader, cut_ids=token_request.sampling.stop_token_ids)
    text_tools = frozenset(tool.called for tool in prompt.tools if tool.takes_text and tool.grammar is None)
    offered = frozenset(tool.called for tool in prompt.tools)
    parser = HarmonyParser(tokenizer.vocabulary, offered, may_call=bool(prompt.tools))
    # The parser consumes the model's own stop tokens.
    cut_ids = request.sampling.stop_token_ids
    return choice(parser, max_calls=request.max_calls, cut_ids=cut_ids, text_tools=text_tools)


def _keep(
    thoughts: Thoughts, owner: str, current_date: str | None, tokenizer: ModelTokenizer, choice: Choice
) -> None:
    turn = choice.written(tokenizer)
    if turn is not None:
        thoughts.keep_turn(owner, choice.call_ids, replace(turn, current_date=current_date))
    else:
        thoughts.keep(owner, choice.call_ids, choice.thought)
