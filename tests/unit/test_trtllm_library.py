"""TensorRT-LLM's builds: which are taken, and what they hide."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.waiting import PATIENCE_S
from workers.engines.trtllm.library import fatal_error, is_healthy, kv_capacity, load_library
from workers.engines.trtllm.watchdog import Patience, Watchdog
from workers.settings import SettingsError


def test_what_a_build_hides_counts_as_well() -> None:
    for llm in (object(), SimpleNamespace(_executor=None), SimpleNamespace(_executor=object())):
        assert fatal_error(llm) is None
        assert is_healthy(llm)
        assert kv_capacity(llm) == (0, 0)
    assert kv_capacity(SimpleNamespace(get_kv_cache_capacity=dict)) == (0, 0)
    capacity = {"maxNumBlocks": 3, "maxNumTokens": 96}
    assert kv_capacity(SimpleNamespace(get_kv_cache_capacity=lambda: capacity)) == (3, 96)


def test_the_llms_own_health_check_counts_before_its_executors() -> None:
    llm = SimpleNamespace(_executor=SimpleNamespace(check_health=lambda: False))
    assert not is_healthy(llm)
    llm._check_health = lambda: True  # noqa: SLF001  TensorRT-LLM's
    assert is_healthy(llm)


def raises() -> bool:
    raise OSError("no such executor")


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        (lambda: False, "TensorRT-LLM reports that it is unhealthy"),
        (raises, "TensorRT-LLM's health check failed: OSError: no such executor"),
    ],
)
async def test_a_failed_health_check_is_reported(check: Callable[[], bool], reason: str) -> None:
    llm = SimpleNamespace(_executor=SimpleNamespace(check_health=check))
    watchdog = Watchdog(llm, leave=lambda _: None, patience=Patience(poll_s=0.001))
    async with asyncio.timeout(PATIENCE_S):
        assert await watchdog.broken() == reason


def test_a_build_without_a_class_that_is_needed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("tensorrt_llm.DisaggregatedParams")
    with pytest.raises(SettingsError, match=r"cannot be imported: .*DisaggregatedParams"):
        load_library()
