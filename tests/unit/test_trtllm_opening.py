"""Loading TensorRT-LLM and its first request: limits, signals, errors in one line, and what builds hide."""

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest

from tests.clock import jumping
from workers.engines.library.adapter import Facts
from workers.engines.library.model_facts import read_model_facts
from workers.engines.trtllm.adapter import TrtllmAdapter
from workers.engines.trtllm.library import fatal_error, is_healthy, kv_capacity, load_library
from workers.engines.trtllm.settings import load_trtllm_settings
from workers.engines.trtllm.watchdog import Patience
from workers.settings_text import SettingsError

FACTS = read_model_facts(Path("models/demo"))


class Args(pydantic.BaseModel):
    max_batch_size: int = 1


async def loaded(folder: Path, llm: Any, first: Any) -> Facts:
    """Load this LLM, whose first request is `first`; its batch size is given in the third line of a YAML."""
    path = folder / "engine.yaml"
    path.write_text("\n\nmax_batch_size: 5\n")
    lib = load_library()
    settings = load_trtllm_settings(lib.args, "agg", yaml_path=path, typed={"model": "/m"})
    adapter = TrtllmAdapter(
        settings,
        replace(lib, llm=lambda **given: SimpleNamespace(generate_async=first, given=llm(**given))),
        FACTS,
        leave=lambda _: None,
        patience=Patience(poll_s=3600),
    )
    try:
        return await adapter.load(lambda: None)
    finally:
        await adapter.stop(is_broken=True)


def runs(token_ids: list[int], params: Any, **_: str) -> Any:
    async def done() -> None:
        assert (len(token_ids) > 1, params.max_tokens, params.ignore_eos) == (True, 2, True)

    return SimpleNamespace(aresult=done)


def hangs(*_: object, **__: str) -> Any:
    return SimpleNamespace(aresult=asyncio.Event().wait)


async def test_while_it_loads_a_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    seen: list[Any] = []
    facts = await loaded(
        tmp_path, lambda **given: seen.append((signal.getsignal(signal.SIGINT), given)), runs
    )
    ((handler, given),) = seen
    assert (handler, given["max_batch_size"], given["model"]) == (signal.SIG_DFL, 5, "/m")
    assert facts.info.context_length == FACTS.context_length  # this LLM does not report its KV cache


def refuses(**_: object) -> None:
    Args.model_validate({"max_batch_size": "many"})


def refuses_all(**_: object) -> None:
    raise ValueError("tp_size and ep_size do not fit")


def fails(**_: object) -> None:
    raise RuntimeError("CUDA out of memory")


@pytest.mark.parametrize(
    ("llm", "says"),
    [
        (refuses, r"engine\.yaml:3: max_batch_size: 'many': .*integer"),
        (refuses_all, "^TensorRT-LLM refuses the settings: tp_size and ep_size do not fit$"),
        (fails, "^TensorRT-LLM did not start: RuntimeError: CUDA out of memory$"),
    ],
)
async def test_a_failed_load_is_one_line_with_its_place(tmp_path: Path, llm: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as failed:
        await loaded(tmp_path, llm, runs)
    assert "\n" not in str(failed.value)


@jumping
async def test_a_first_request_that_hangs_is_given_up_after_minutes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its first request failed"):
        await loaded(tmp_path, dict, hangs)
    assert 60 <= asyncio.get_running_loop().time() <= 600


def test_what_a_build_hides_counts_as_well() -> None:
    for llm in (object(), SimpleNamespace(_executor=None), SimpleNamespace(_executor=object())):
        assert fatal_error(llm) is None
        assert is_healthy(llm)
        assert kv_capacity(llm) == (0, 0)
    assert kv_capacity(SimpleNamespace(get_kv_cache_capacity=dict)) == (0, 0)
    told = {"maxNumBlocks": 3, "maxNumTokens": 96}
    assert kv_capacity(SimpleNamespace(get_kv_cache_capacity=lambda: told)) == (3, 96)


@pytest.mark.parametrize(
    ("own", "executors", "healthy"), [(False, True, False), (True, False, True), (None, False, False)]
)
def test_the_llms_own_health_check_counts_before_its_executors(
    own: bool | None, executors: bool, healthy: bool
) -> None:
    llm = SimpleNamespace(_executor=SimpleNamespace(check_health=lambda: executors))
    if own is not None:
        llm._check_health = lambda: own  # noqa: SLF001  TensorRT-LLM's
    assert is_healthy(llm) == healthy


@pytest.mark.parametrize(
    ("version", "is_old"),
    [("1.2.1", True), ("0.21.0", True), ("1.3.0rc2", False), ("2.0", False), ("main", False)],
)
def test_releases_before_1_3_are_refused(version: str, is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorrt_llm.__version__", version)
    if is_old:
        with pytest.raises(SettingsError, match=f"{version} is too old"):
            load_library()
    else:
        assert load_library().version == version


def test_a_build_without_a_class_that_is_needed_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("tensorrt_llm.DisaggregatedParams")
    with pytest.raises(SettingsError, match=r"cannot be imported: .*DisaggregatedParams"):
        load_library()
