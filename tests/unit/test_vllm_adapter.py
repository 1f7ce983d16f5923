"""Requests in vLLM's terms, its outputs as chunks, its figures, and the release of pins."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.outputs import CompletionOutput, RequestOutput, RequestStateStats
from vllm.sampling_params import RequestOutputKind, SamplingParams

from baton.errors import BatonError, EngineFailure, HandoffFailed, InvalidRequest, WorkerLost
from baton.messages import GenerateRequest, Guided, MessageForm, TokenChunk, WorkerStats
from baton.structural_tag import structural_tag
from tests.clock import jumping, now_s
from tests.requests import token_request
from tests.waiting import until
from workers.engines.library.adapter import Call
from workers.engines.library.model_facts import read_model_facts
from workers.engines.vllm.adapter import KEEP, VllmAdapter
from workers.engines.vllm.library import load_library
from workers.engines.vllm.sampling import is_continued_exactly, sampling_params
from workers.engines.vllm.settings import LEASE_S, VLLM_RULES

FACTS = read_model_facts(Path("models/demo"))
STOPS = (3071, 3070)


def ask(**options: Any) -> GenerateRequest:
    defaults: dict[str, Any] = {"max_tokens": 10, "seed": 3, "stop_token_ids": STOPS}
    return token_request([1] * 5, **defaults | options)


def call_of(request: GenerateRequest, **role: Any) -> Call:
    return Call(
        id="r-1", request=request, max_tokens=10, deadline=0, cache_salt="", num_lacking=lambda: 5, **role
    )


def params(request: GenerateRequest, **sent: Any) -> dict[str, Any]:
    """The fields that differ from vLLM's defaults."""
    built = sampling_params(request, load_library(), FACTS, **{"max_tokens": 10} | sent)
    plain = SamplingParams()
    return {name: value for name, value in vars(built).items() if value != getattr(plain, name)}


ALWAYS = {
    "max_tokens": 10, "seed": 3, "ignore_eos": True, "stop_token_ids": list(STOPS), "detokenize": False,
    "output_kind": RequestOutputKind.DELTA,
}  # fmt: skip
PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": 0.25, "repetition_penalty": 1.5}


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({}, {}),
        ({"temperature": 0.5, "top_k": -1, "top_p": 0.5}, {"temperature": 0.5, "top_p": 0.5}),
        ({"top_k": 7, "min_p": 0.1}, {"top_k": 7, "min_p": 0.1}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"prompt_logprobs": 0}, {"prompt_logprobs": 0}),
        ({"logit_bias": {3: 1.5}}, {"logit_bias": {3: 1.5}}),
        ({"min_tokens": 4}, {"min_tokens": 4}),
        ({"ignore_eos": True}, {"stop_token_ids": []}),
        (PENALTIES, PENALTIES),
    ],
)
def test_sampling_is_translated_for_vllm(asked: dict[str, Any], sent: dict[str, Any]) -> None:
    expected = {name: value for name, value in (ALWAYS | sent).items() if value != []}
    assert params(ask(**asked)) == expected


def test_a_resumed_answer_asks_vllm_for_the_rest() -> None:
    request = ask(num_generated=3, min_tokens=5)
    sent = params(request, max_tokens=7)
    assert (sent["max_tokens"], sent["min_tokens"]) == (7, 2)
    assert sent["seed"] == request.sampling.seed_of_attempt(3) != 3
    assert params(request, is_positional=True)["seed"] == 3  # of token 4, whose place counts anyway


@pytest.mark.parametrize(
    ("asked", "exactly", "exactly_by_place"),
    [
        ({}, True, True),
        ({"temperature": 1.0}, True, True),
        ({"temperature": 1.0, "is_seeded": True}, False, True),
        ({"temperature": 0.0, "is_seeded": True}, True, True),
        ({"frequency_penalty": 0.1}, False, False),
        ({"presence_penalty": 0.1}, False, False),
        ({"prompt_logprobs": 0}, False, False),
        ({"guided": Guided(last=(MessageForm(headers=("h",), end="e"),))}, False, False),
    ],
    ids=str,
)
def test_decode_goes_on_with_prefills_token_only_where_that_changes_nothing(
    asked: dict[str, Any], exactly: bool, exactly_by_place: bool
) -> None:
    sampling = ask(**asked).sampling
    assert bool(is_continued_exactly(sampling, is_positional=False)) == exactly
    assert bool(is_continued_exactly(sampling, is_positional=True)) == exactly_by_place


def test_a_demanded_form_becomes_a_structural_tag() -> None:
    form = Guided(
        leading=(),
        last=(MessageForm(headers=("<|channel|>final<|message|>",), end="<|return|>", grammar="{}"),),
    )
    sent = params(ask(guided=form, min_tokens=5))
    assert sent["structured_outputs"].structural_tag == structural_tag(form, FACTS.control_ids)
    assert "min_tokens" not in sent  # the form says where the answer ends


def test_sampling_that_a_release_refuses_or_lacks_is_the_clients_fault() -> None:
    def older(*, max_tokens: int) -> None:
        """Takes one parameter."""

    lib = load_library()
    for build in (lib, dataclasses.replace(lib, sampling_params=older)):
        with pytest.raises(InvalidRequest):
            sampling_params(ask(temperature=3.0), build, FACTS, max_tokens=1)


class Llm:
    """Yields these results for each request, then waits. Records what is submitted and released."""

    errored = False

    def __init__(self, *results: Any, releases: tuple[list[str] | Exception, ...] = ()) -> None:
        self.num_open = 0
        self.submitted: list[tuple[Any, Any, str, int]] = []
        self.released: list[list[str]] = []
        self.released_at_s: list[float] = []
        self.may_release = asyncio.Event()
        self._results = results
        self._answers = list(releases)

    async def generate(
        self, prompt: Any, sampling: Any, request_id: str, *, trace_headers: None, priority: int
    ) -> AsyncGenerator[Any, None]:
        self.submitted.append((prompt, sampling, request_id, priority))
        self.num_open += 1
        try:
            for result in self._results:
                yield result
            await asyncio.Event().wait()
        finally:
            self.num_open -= 1

    async def collective_rpc(self, method: str, *, args: tuple[list[str]], timeout: float) -> Any:  # noqa: ASYNC109  vLLM's
        assert (method, timeout < LEASE_S) == ("release_kv", True)
        self.released.append(args[0])
        self.released_at_s.append(now_s())
        await self.may_release.wait()
        answer = self._answers.pop(0) if self._answers else []
        if isinstance(answer, Exception):
            raise answer
        return [answer, None]

    def shutdown(self) -> None:
        """See AsyncLLM."""


def adapter_of(llm: Llm) -> VllmAdapter:
    lib = load_library()
    adapter = VllmAdapter(VLLM_RULES.load(lib.engine_args, "prefill", typed={"model": "m"}), lib, FACTS)
    adapter.llm = llm
    return adapter


def output(reason: str | None = None, num_cached: int | None = 4, **given: Any) -> RequestOutput:
    output = {"token_ids": [8, 9], "logprobs": None} | given
    return RequestOutput(
        "r", [CompletionOutput(0, "", finish_reason=reason, **output)], bool(reason), num_cached
    )


async def chunks_of(call: Call, *results: RequestOutput) -> list[TokenChunk]:
    adapter = adapter_of(Llm(*results))
    adapter.submit(call)
    return [await adapter.step(call) for _ in results]


async def submitted(adapter: VllmAdapter, call: Call) -> Call:
    """The call after its first step."""
    adapter.submit(call)
    await adapter.step(call)
    return call


async def test_a_prompt_that_is_handed_over_has_its_parameters_and_its_blocks_are_counted() -> None:
    adapter = adapter_of(llm := Llm())
    for groups, count in (([[1, 2], [3]], 3), (((1, 2),), 2), ([4, 5], 2), (None, 0), ([[]], 0)):
        result = output("length", token_ids=[8])
        result.kv_transfer_params = {"remote_block_ids": groups}
        llm._results = (result,)  # noqa: SLF001  the library is ours
        call = await submitted(adapter, call_of(ask(), hands_over=True))
        assert llm.submitted[-1][1].extra_args == {"kv_transfer_params": KEEP}
        assert (call.kept, call.num_kept_blocks) == ({"remote_block_ids": groups}, count)
        assert call.is_continued
    llm._results = (output("length"),)  # noqa: SLF001  as above
    assert (await submitted(adapter, call_of(ask(), hands_over=True))).kept is None


async def test_without_its_connector_decode_samples_the_first_token_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("BATON_VLLM_WITHOUT", "connector, release")
    result = output("length", token_ids=[8])
    result.kv_transfer_params = {"remote_block_ids": [[1]]}
    adapter = adapter_of(llm := Llm(result))
    call = await submitted(adapter, call_of(ask(), hands_over=True))
    assert (call.kept, call.is_continued) == ({"remote_block_ids": [[1]]}, False)
    await adapter.abort(call)
    await asyncio.sleep(0)  # a release would have begun
    assert llm.released == []


@pytest.mark.parametrize(
    ("role", "results", "kind"),
    [
        ({}, [output("error")], EngineFailure),
        ({}, [output("repetition")], EngineFailure),
        ({}, [output("abort")], WorkerLost),  # asked to end, so that another worker may serve
        ({"transfer": {}}, [output("error")], HandoffFailed),
        ({"transfer": {}}, [output(), output("error")], EngineFailure),  # the KV had arrived
    ],
)
async def test_other_finish_reasons_are_errors(
    role: dict[str, Any], results: list[RequestOutput], kind: type[BatonError]
) -> None:
    with pytest.raises(kind):
        await chunks_of(call_of(ask(), **role), *results)


def test_an_error_is_the_clients_the_requests_or_the_cores() -> None:
    adapter, wrapper = adapter_of(Llm()), KeyError("generation failed")
    wrapper.__cause__ = OSError("no such page")
    dead = adapter.lib.dead()
    for error, kind, says in (
        (ValueError("too long"), InvalidRequest, "too long"),
        (wrapper, EngineFailure, "no such page"),
        (dead, WorkerLost, "core died"),
    ):
        failure = adapter.failure(error, call_of(ask()))
        assert (type(failure), says in failure.message) == (kind, True)
        adapter.llm.errored = True  # whatever read its outputs has ended
        assert isinstance(adapter.failure(error, call_of(ask())), WorkerLost)
        adapter.llm.errored = False


@pytest.mark.parametrize(
    ("transfer", "pulls_s", "expected"),
    [
        (None, [9.0], (2.0, 0.0, 0.5)),
        ({}, [], (2.0, 0.5, 0.0)),  # with the first step
        ({}, [0.25, 1.5, 1.0], (0.5, 2.0, 0.0)),  # not known by request: the longest
        ({}, [9.0], (0.0, 2.5, 0.0)),
    ],
)
def test_a_request_has_waited_and_computed_by_vllms_clock_and_waits_for_kv_in_its_queue(
    transfer: dict[str, Any] | None, pulls_s: list[float], expected: tuple[float, float, float]
) -> None:
    adapter = adapter_of(Llm())
    call = call_of(ask(), transfer=transfer)
    adapter._figures.record(step({"transfer_duration": pulls_s}), None)  # noqa: SLF001  vLLM's stat logger
    call.spent.began_s -= 60
    adapter._note_durations(call, None)  # noqa: SLF001  its statistics may be off
    assert not any(call.spent.parts)
    adapter._note_durations(call, RequestStateStats(1000.0, 1002.0, 1002.5))  # noqa: SLF001
    assert call.spent.parts == expected


def step(transfers: dict[str, Any] | None = None, **figures: Any) -> Any:
    """vLLM's SchedulerStats."""
    idle = {"num_running_reqs": 0, "num_waiting_reqs": 0, "kv_cache_usage": 0.0}
    return SimpleNamespace(**idle | figures, kv_connector_stats=transfers)


def test_figures_are_those_of_the_last_step_and_all_transfers() -> None:
    adapter = adapter_of(Llm())
    figures, failed = adapter._figures, list[bool]()  # noqa: SLF001  vLLM's stat logger
    figures.on_failed_pull = lambda: failed.append(True)
    assert adapter.figures(set()) == WorkerStats()
    figures.num_blocks = 100
    kept = {call_of(ask()) for _ in range(2)}
    for call in kept:
        call.kept, call.num_kept_blocks = {}, 5
    assert adapter.figures(kept).kv_used_blocks == 0  # vLLM has not reported them yet
    figures.record(step({"bytes_transferred": [10, 20], "transfer_duration": [0.25, 0.5]}), None)
    assert not failed
    figures.record(step({"bytes_transferred": [30], "num_failed_transfers": [1]}), None)
    assert failed == [True]
    figures.record(
        step(num_running_reqs=7, num_waiting_reqs=6, num_skipped_waiting_reqs=2, kv_cache_usage=0.5), None
    )
    figures.record(None, None, engine_idx=0)  # a step without stats changes nothing
    assert adapter.figures(kept) == WorkerStats(
        num_running=7, num_waiting=8, kv_blocks=100, kv_used_blocks=50 - 10, kv_pinned_blocks=10,
        kv_moved_bytes=60, kv_move_s=0.75,
    )  # fmt: skip


async def release(adapter: VllmAdapter, *ids: str) -> None:
    """Close prefill calls with these ids."""
    for call_id in ids:
        adapter.submit(call := dataclasses.replace(call_of(ask(), hands_over=True), id=call_id))
        await adapter.abort(call)


@pytest.mark.parametrize("answer", [[], TimeoutError()], ids=repr)
@jumping
async def test_pins_that_end_while_vllm_answers_or_fails_go_with_the_next_message(answer: Any) -> None:
    adapter = adapter_of(llm := Llm(releases=(answer,)))
    await release(adapter, "a")
    await until(lambda: llm.released)
    await release(adapter, "b", "c")
    llm.may_release.set()
    await until(lambda: len(llm.released) >= 2)
    assert llm.released == [["a"], ["b", "c"]]
