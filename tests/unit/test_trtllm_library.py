"""TensorRT-LLM's builds: which are taken, and what they hide."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from workers.engines.library.model_facts import read_model_facts
from workers.engines.trtllm.library import fatal_error, is_healthy, kv_capacity, load_library
from workers.settings import SettingsError

FACTS = read_model_facts(Path("models/demo"))


def test_what_a_build_hides_counts_as_well() -> None:
    for llm in (object(), SimpleNamespace(_executor=None), SimpleNamespace(_executor=object())):
        assert fatal_error(llm) is None
        assert is_healthy(llm)
        assert kv_capacity(llm) == (0, 0)
    assert kv_capacity(SimpleNamespace(get_kv_cache_capacity=dict)) == (0, 0)
    capacity = {"maxNumBlocks": 3, "maxNumTokens": 96}
    assert kv_capacity(SimpleNamespace(get_kv_cache_capacity=lambda: capacity)) == (3, 96)


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


def test_a_build_without_a_class_that_is_needed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("tensorrt_llm.DisaggregatedParams")
    with pytest.raises(SettingsError, match=r"cannot be imported: .*DisaggregatedParams"):
        load_library()
