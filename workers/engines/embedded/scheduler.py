"""The scheduler: chooses each step's requests and tokens, without torch or a clock."""

import enum
from collections import Counter, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from baton.messages import FinishReason, GenerateRequest, Sampling, TokenLogprob
from workers.durations import Durations
from workers.engines.embedded.grammar import Matcher
from workers.engines.embedded.guesses import MOST_GUESSES, Guesser
from workers.engines.embedded.ledger import BlockLedger, Lease
from workers.engines.embedded.settings import EmbeddedSettings
from workers.engines.prefixes import Chain, keys_within, next_key
from workers.engines.requests import check_request, num_left

# One of so many tokens in a step may be guessed, so that prompts go on.
_SHARE_OF_GUESSES = 8
# With more requests a step guesses nothing: an answer's share would be below four.
_MOST_GUESSING = 16


class Phase(enum.Enum):
    """The life of a sequence.

    Aggregated: WAITING -> RUNNING -> DONE. Prefill workers: RUNNING -> PINNED -> DONE. Decode workers with a
    handoff: WAITING -> PULLING -> RUNNING -> DONE. Any phase may go to DONE."""

    WAITING = "waiting"
    PULLING = "pulling"
    RUNNING = "running"
    PINNED = "pinned"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens and state.

    `token_ids` is the prompt and everything generated, by earlier attempts too; the first `num_prompt` are
    the prompt. The KV of the first `num_computed` is in `lease.blocks`. `num_reserved` is its maximum length:
    its blocks are reserved at admission, so that nothing running is evicted. `pulls_kv`: its prompt's KV
    comes from a prefill worker; `hands_off`: it goes to a decode worker. `matcher` constrains the answer; the
    next token is not sampled before it `is_ready`. `prompt_logprobs` are those of the prompt's computed part,
    if requested. `chain` has the keys of its blocks. The KV of its first `num_cached` tokens was found;
    `num_moved_bytes` were pulled. `guesser` guesses its next tokens, once it decodes."""

    token_ids: list[int]
    num_prompt: int
    sampling: Sampling
    num_reserved: int
    pulls_kv: bool = False
    hands_off: bool = False
    priority: int = 0
    chain: Chain = field(default_factory=Chain)
    matcher: Matcher | None = None
    phase: Phase = Phase.WAITING
    num_computed: int = 0
    lease: Lease = field(default_factory=Lease)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached: int = 0
    num_moved_bytes: int = 0
    spent: Durations = field(default_factory=Durations)
    guesser: Guesser | None = None

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far; the index of the next one."""
        return len(self.token_ids) - self.num_prompt

    @property
    def may_sample(self) -> bool:
        """Whether the mask of the next token is known."""
        return self.matcher is None or self.matcher.is_ready


@dataclass(frozen=True, slots=True)
class Work:
    """`token_ids` of one sequence to run, from position `start`. If `samples`, they are its last ones, and
    after them `num_guessed` that may follow."""

    sequence: Sequence
    start: int
    token_ids: list[int]
    samples: bool
    num_guessed: int = 0

    @property
    def guesses(self) -> list[int]:
        return self.token_ids[len(self.token_ids) - self.num_guessed :]


@dataclass(frozen=True, slots=True)
class Step:
    """One step's work: single tokens first, then answers by number of guesses, then longer pieces of prompts.
    Attention processes equal numbers of tokens together.

    `to_pull` were just admitted and wait for their KV from a prefill worker."""

    work: list[Work] = field(default_factory=list)
    to_pull: list[Sequence] = field(default_factory=list)


class Scheduler:
    """First come, first served within a priority; a sequence is admitted when its whole reservation fits.

    So it cannot deadlock: every admitted sequence can finish without another block."""

    def __init__(
        self, settings: EmbeddedSettings, *, num_blocks: int, context_length: int, vocab_size: int
    ) -> None:
        self._tokens_per_block = settings.kv_cache_config.tokens_per_block
        self.ledger = BlockLedger(num_blocks)
        self.counts: Counter[str] = Counter()  # as `WorkerStats` names them
        self._settings = settings
        self._max_num_tokens = settings.max_num_tokens
        self._reuses_blocks = settings.kv_cache_config.enable_block_reuse
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._waiting: deque[Sequence] = deque()
        self._admitted: dict[Sequence, None] = {}  # in order of admission; running or pulling

    @property
    def num_waiting(self) -> int:
        """Sequences without blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._admitted)

    def sequence(self, request: GenerateRequest, *, hands_off: bool) -> Sequence:
        """That of a request, to be added. Blocks are reserved for its whole answer or, if it hands off, its
        prompt. Raises InvalidRequest."""
        check_request(request, self._vocab_size, self._context_length)
        num_new_tokens = 0 if hands_off else num_left(request, self._context_length)
        return Sequence(
            token_ids=list(request.token_ids),
            num_prompt=request.num_prompt_tokens,
            sampling=request.sampling,
            num_reserved=len(request.token_ids) + num_new_tokens,
            pulls_kv=request.handoff is not None and not hands_off,
            hands_off=hands_off,
            priority=request.priority,
            chain=Chain(request.cache_salt),
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; its reservation must fit an empty pool, or it is never admitted."""
        place = len(self._waiting)
        while place and self._waiting[place - 1].priority > sequence.priority:
            place -= 1
        self._waiting.insert(place, sequence)

    def plan(self) -> Step:
        """Admit what fits and choose the next step's work; empty if there is nothing to compute."""
        step = Step(to_pull=list(self._admit()))
        running = [sequence for sequence in self._admitted if sequence.phase is Phase.RUNNING]
        prompts = [sequence for sequence in running if len(sequence.token_ids) - sequence.num_computed > 1]
        num_guesses = self._num_guesses(len(running), len(running) - len(prompts))
        for sequence in running:
            if len(sequence.token_ids) - sequence.num_computed == 1 and sequence.may_sample:
                step.work.append(_next_work(sequence, 1, self._guessed(sequence, num_guesses)))
        budget = self._max_num_tokens - sum(len(work.token_ids) for work in step.work)
        for sequence in prompts:
            num_left = len(sequence.token_ids) - sequence.num_computed
            if budget <= 0:
                break  # the oldest prompt first, so that later ones cannot starve it
            if num_left <= budget and not sequence.may_sample:
                continue
            step.work.append(_next_work(sequence, min(num_left, budget)))
            budget -= min(num_left, budget)
        step.work.sort(key=lambda work: (len(work.token_ids) > 1 + work.num_guessed, work.num_guessed))
        return step

    def _num_guesses(self, num_running: int, num_answers: int) -> int:
        """How many tokens of each answer may be guessed in this step."""
        if not self._settings.speculate or num_running > _MOST_GUESSING or not num_answers:
            return 0
        room = min(self._max_num_tokens // _SHARE_OF_GUESSES, self._max_num_tokens - num_running)
        return min(MOST_GUESSES, room // num_answers)

    def _guessed(self, sequence: Sequence, most: int) -> list[int]:
        """None beyond the end of the answer, or where a form says what may come."""
        sampling = sequence.sampling
        most = min(
            most,
            sampling.max_tokens - sequence.num_generated - 1,
            self._context_length - len(sequence.token_ids) - 1,
        )
        if most < 1 or sequence.matcher is not None or sequence.hands_off:
            return []
        if sequence.guesser is None:
            sequence.guesser = Guesser(sequence.num_reserved)
        guessed = sequence.guesser.guess(sequence.token_ids, most)
        stops = () if sampling.ignore_eos else sampling.stop_token_ids
        return list(takewhile(lambda token_id: token_id not in stops, guessed))

    def advance(self, work: Work, token_ids: list[int]) -> FinishReason | None:
        """Record that `work` ran and, if it sampled, chose `token_ids`: the right guesses and one more.
        Returns whether the sequence ended.

        A sequence that hands off is then pinned: its prompt is complete and waits for a peer, out of the
        batch."""
        sequence, right = work.sequence, token_ids[:-1]
        sequence.token_ids += right
        num_run = len(work.token_ids) - work.num_guessed
        self._note_computed(sequence, sequence.num_computed + num_run + len(right))
        if sequence.guesser is not None and work.num_guessed:
            sequence.guesser.note(work.num_guessed, len(right))
            self.counts["num_accepted_guesses"] += len(right)
            self.counts["num_rejected_guesses"] += work.num_guessed - len(right)
        if not token_ids:
            return None
        reason = self._append(sequence, token_ids[-1])
        if reason is None and sequence.hands_off:
            self.ledger.pin(sequence.lease)
            del self._admitted[sequence]
            sequence.phase = Phase.PINNED
        return reason

    def pulled(self, sequence: Sequence, first_token: int) -> FinishReason | None:
        """The rest of the prompt's KV has arrived: continue from `first_token`."""
        self._note_computed(sequence, len(sequence.token_ids))
        sequence.phase = Phase.RUNNING
        return self._append(sequence, first_token)

    def _append(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        sampling = sequence.sampling
        reason: FinishReason
        sequence.token_ids.append(token_id)
        if not sampling.ignore_eos and token_id in sampling.stop_token_ids:
            reason = "stop"
        elif sequence.num_generated >= sampling.max_tokens or len(sequence.token_ids) >= self._context_length:
            reason = "length"
        else:
            return None
        self.remove(sequence)
        return reason

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence in any phase and free its blocks. Idempotent."""
        if sequence.phase is Phase.DONE:
            return
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        self._admitted.pop(sequence, None)
        index, num_rest = divmod(sequence.num_computed, self._tokens_per_block)
        if self._reuses_blocks and num_rest:
            rest = sequence.token_ids[sequence.num_computed - num_rest : sequence.num_computed]
            self.ledger.keep(sequence.lease, index, next_key(sequence.chain.keys[index], rest))
        self.ledger.free(sequence.lease)
        sequence.phase = Phase.DONE

    def num_lacking(self, sequence: Sequence) -> int:
        return len(sequence.token_ids) - self._find(sequence)[1]

    def _find(self, sequence: Sequence) -> tuple[list[int], int]:
        """The blocks with KV that the sequence need not compute or pull, and of how many tokens: never the
        last one. If these do not fill the last block, an earlier sequence ended there."""
        if not self._reuses_blocks or sequence.sampling.prompt_logprobs is not None:
            return [], 0
        token_ids, size = sequence.token_ids, self._tokens_per_block
        most = len(token_ids) - 1
        keys = self._keys(sequence, most)
        found = self.ledger.find(keys[1:])
        start = len(found) * size
        rest = keys_within(keys[len(found)], token_ids[start : min(start + size - 1, most)])
        for end, key in reversed(list(enumerate(rest, start + 1))):
            if block := self.ledger.find([key]):
                return found + block, end
        return found, start

    def _keys(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Those of its salt and its full blocks."""
        deque(sequence.chain.follow(sequence.token_ids, num_tokens, self._tokens_per_block), maxlen=0)
        return sequence.chain.keys

    def _note_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of so many tokens has been computed or pulled: the blocks that it fills can be found."""
        first, sequence.num_computed = sequence.num_computed // self._tokens_per_block, num_tokens
        for i in range(first, num_tokens // self._tokens_per_block if self._reuses_blocks else 0):
            self.ledger.keep(sequence.lease, i, self._keys(sequence, num_tokens)[i + 1])

    def _admit(self) -> Iterator[Sequence]:
        while self._waiting and len(self._admitted) < self._settings.max_batch_size:
            sequence = self._waiting[0]
            found, num_found = self._find(sequence)
            num_blocks = -(-sequence.num_reserved // self._tokens_per_block)
            lease = self.ledger.reserve(num_blocks, found, num_found // self._tokens_per_block)
            if lease is None:
                return
            self._waiting.popleft()
            sequence.lease = lease
            sequence.num_computed = sequence.num_cached = num_found
            self.counts["num_cached_tokens"] += num_found
            self._admitted[sequence] = None
            sequence.phase = Phase.PULLING if sequence.pulls_kv else Phase.RUNNING
            if sequence.pulls_kv:
                yield sequence


def _next_work(sequence: Sequence, num_tokens: int, guessed: Collection[int] = ()) -> Work:
    start = sequence.num_computed
    end = start + num_tokens
    token_ids = [*sequence.token_ids[start:end], *guessed]
    return Work(sequence, start, token_ids, end == len(sequence.token_ids), len(guessed))
