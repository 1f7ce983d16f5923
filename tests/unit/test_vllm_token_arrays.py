"""Long prompts reach the second runner's buffer as arrays; the classes here do as vLLM 0.25's do."""

import gc
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from workers.engines.vllm.token_arrays import convert_early

LONG = list(range(100_000, 132_000))
SHORT = [7, 8, 9]


class EngineCore:
    """vllm.v1.engine.core"""

    def preprocess_add_request(self, request: "Request") -> tuple["Request", int]:
        return request, 0


class Request:
    """vllm.v1.request, made in the thread that reads requests."""

    def __init__(self, request_id: str, prompt_token_ids: list[int] | None) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids


class StagedWriteTensor:
    """vllm.v1.worker.gpu.buffer_utils"""

    def __init__(self) -> None:
        self.rows: dict[int, list[int]] = {}
        self._staged_write_indices: list[int] = []
        self._staged_write_contents: list[int] = []
        self._staged_write_cu_lens: list[int] = []

    def stage_write(self, index: int, x: list[int]) -> None:
        if not x:
            return
        self._staged_write_indices.append(index)
        self._staged_write_contents.extend(x)
        self._staged_write_cu_lens.append(len(self._staged_write_contents))

    def apply_write(self) -> None:
        buffers: Any = sys.modules["vllm.v1.worker.gpu.buffer_utils"]
        contents = buffers.async_tensor_h2d(self._staged_write_contents, device="cuda", dtype="int32")
        starts = [0, *self._staged_write_cu_lens]
        for index, start, end in zip(self._staged_write_indices, starts, starts[1:], strict=False):
            self.rows[index] = contents[start:end].tolist()
        for staged in (self._staged_write_indices, self._staged_write_contents, self._staged_write_cu_lens):
            staged.clear()


class RequestState:
    """vllm.v1.worker.gpu.states"""

    def __init__(self, max_num_reqs: int) -> None:
        self.free_indices = list(range(max_num_reqs))
        self.all_token_ids = StagedWriteTensor()
        self.kinds: list[type] = []

    def add_request(self, req_id: str, prompt_len: int, all_token_ids: list[int], max_tokens: int) -> int:
        index = self.free_indices.pop()
        self.kinds.append(type(all_token_ids))
        assert prompt_len <= len(all_token_ids)
        assert max_tokens == 5
        self.all_token_ids.stage_write(index, all_token_ids)
        return index


class Runner:
    """What the two threads of vLLM's core do with requests."""

    def __init__(self) -> None:
        self.copied: list[type] = []
        self.core = EngineCore()
        self.states: RequestState | None = None

    def copy(self, data: Any, device: str, dtype: str) -> Any:
        assert (device, dtype) == ("cuda", "int32")
        self.copied.append(type(data))
        return np.array(data, dtype=dtype)

    def read(self, request: Request) -> Request:
        return self.core.preprocess_add_request(request)[0]

    def add(self, request: Request, *answer: int) -> None:
        if self.states is None:
            self.states = RequestState(max_num_reqs=8)
        tokens = request.prompt_token_ids or []
        self.states.add_request(
            req_id=request.request_id,
            prompt_len=len(tokens),
            all_token_ids=[*tokens, *answer],
            max_tokens=5,
        )

    def step(self) -> list[list[int]]:
        assert self.states is not None
        self.states.all_token_ids.rows.clear()
        self.states.all_token_ids.apply_write()
        return list(self.states.all_token_ids.rows.values())

    @property
    def kinds(self) -> list[str]:
        assert self.states is not None
        return [kind.__name__ for kind in self.states.kinds]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    made = Runner()
    install(monkeypatch, made.copy)
    convert_early()
    return made


def install(monkeypatch: pytest.MonkeyPatch, copy: Callable[..., Any]) -> None:
    for owner, name in [
        (EngineCore, "preprocess_add_request"),
        (RequestState, "__init__"),
        (RequestState, "add_request"),
    ]:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # undone after the test
    modules: dict[str, dict[str, Any]] = {
        "vllm.v1.engine.core": {"EngineCore": EngineCore},
        "vllm.v1.worker.gpu.buffer_utils": {"async_tensor_h2d": copy},
        "vllm.v1.worker.gpu.states": {"RequestState": RequestState},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def test_a_long_prompt_is_converted_before_its_step(runner: Runner) -> None:
    long, short = runner.read(Request("long", LONG)), runner.read(Request("short", SHORT))
    runner.add(long)
    runner.add(short)
    assert runner.step() == [LONG, SHORT]
    assert (runner.kinds, runner.copied) == (["TokenIds", "list"], [np.ndarray])


def test_each_step_writes_its_own_tokens_only(runner: Runner) -> None:
    for name in ("a", "b"):
        runner.add(runner.read(Request(name, [*LONG, ord(name)])))
        assert runner.step() == [[*LONG, ord(name)]]


def test_a_preempted_request_comes_back_with_its_answer(runner: Runner) -> None:
    runner.add(runner.read(Request("long", LONG)), 1, 2)
    assert runner.step() == [[*LONG, 1, 2]]


def test_nothing_is_kept_of_a_request_that_has_ended(runner: Runner) -> None:
    runner.read(Request("again", LONG))
    gc.collect()
    runner.add(Request("again", LONG[::-1]))
    assert runner.step() == [LONG[::-1]]


@pytest.mark.parametrize("tokens", [None, [], SHORT], ids=["embeddings", "empty", "short"])
def test_other_requests_are_left_alone(runner: Runner, tokens: list[int] | None) -> None:
    request = runner.read(Request("other", tokens))
    assert set(vars(request)) == {"request_id", "prompt_token_ids"}


def test_a_build_with_another_runner_is_logged_and_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, Runner().copy)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu.buffer_utils", ModuleType("buffer_utils"))
    before = EngineCore.preprocess_add_request
    with caplog.at_level(logging.WARNING):
        convert_early()
    assert "wait some milliseconds for each long prompt" in caplog.text
    assert EngineCore.preprocess_add_request is before


def test_what_is_no_list_of_tokens_is_copied_as_before(runner: Runner) -> None:
    buffers: Any = sys.modules["vllm.v1.worker.gpu.buffer_utils"]
    for data in ([1, 2], np.array([1, 2])):
        assert buffers.async_tensor_h2d(data, device="cuda", dtype="int32").tolist() == [1, 2]
    assert runner.copied == [list, np.ndarray]
