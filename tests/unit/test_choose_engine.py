"""Choosing an engine without --engine: the one that the YAML is for, or what to set instead."""

import shlex
from pathlib import Path

import pytest

from baton.flags import parse
from tests.stack import ROOT
from workers.engines.choose import CHOSEN, with_engine
from workers.flags import WorkerSettings
from workers.settings_text import SettingsError

CONFIGS = ROOT / "engine_configs"
GUIDE = CONFIGS / "gpt-oss-120b/prefill.yaml"
ALL = {"tensorrt_llm", "vllm", "transformers"}
# Guides that write YAMLs of their own.
BLOG = "enable_attention_dp: false\nenable_mixed_sampler: true\ncuda_graph_config:\n    max_batch_size: 8\n"


def chosen(line: str, installed: set[str]) -> str | None:
    parsed = parse(WorkerSettings, shlex.split(line), prog="p", description="d", environ={})
    complete = with_engine(parsed, installed.__contains__)
    assert complete.sources["engine"] == (CHOSEN if parsed.settings.engine is None else "flag")
    return complete.settings.engine


@pytest.mark.parametrize(
    ("engine", "files"),
    [("trtllm", "gpt-oss-*/*.yaml"), ("vllm", "vllm/*/*.yaml"), ("embedded", "demo/[adp]*.yaml")],
)
def test_the_shipped_yamls_are_known_by_their_keys(engine: str, files: str) -> None:
    paths = list(CONFIGS.glob(files))
    assert len(paths) > 2
    assert {chosen(f"--extra-engine-args {path}", ALL) for path in paths} == {engine}


def test_a_yaml_of_the_guides_is_tensorrt_llms(tmp_path: Path) -> None:
    (tmp_path / "low_latency.yaml").write_text(BLOG)
    assert chosen(f"--extra-engine-args {tmp_path}/low_latency.yaml", ALL) == "trtllm"


@pytest.mark.parametrize(
    ("installed", "engine"),
    [
        ({"tensorrt_llm", "transformers"}, "trtllm"),
        ({"vllm", "transformers"}, "vllm"),
        ({"transformers"}, "embedded"),
    ],
)
@pytest.mark.parametrize("line", ["", "--max-batch-size 4", "--extra-engine-args no/such.yaml"])
def test_without_a_yaml_that_tells_what_is_installed_counts(
    line: str, installed: set[str], engine: str
) -> None:
    assert chosen(line, installed) == engine


def test_what_is_typed_counts_whatever_is_installed() -> None:
    assert chosen(f"--engine mocker --extra-engine-args {GUIDE}", set()) == "mocker"


@pytest.mark.parametrize(
    ("line", "installed", "says"),
    [
        (f"--extra-engine-args {GUIDE}", {"transformers"}, "prefill.yaml: needs TensorRT-LLM, which is not"),
        (f"--extra-engine-args {GUIDE}", {"transformers"}, "run this in the worker image"),
        (f"--extra-engine-args {CONFIGS}/demo/agg.yaml", {"vllm"}, "agg.yaml: needs the embedded engine"),
        ("", set(), "needs TensorRT-LLM or vLLM or the embedded engine, which is not installed"),
        ("", {"tensorrt_llm", "vllm"}, "set --engine trtllm or --engine vllm"),
    ],
)
def test_what_cannot_run_here_is_refused_with_what_to_type(line: str, installed: set[str], says: str) -> None:
    with pytest.raises(SettingsError, match="set --engine") as refused:
        chosen(line, installed)
    assert says in str(refused.value)
