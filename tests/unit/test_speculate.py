"""`--speculate`: one setting for every engine; which workers can have it, and what the libraries get."""

import json
from typing import Any

import pytest
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from vllm.engine.arg_utils import AsyncEngineArgs

from baton.flags import read
from baton.messages import NO_DRAFT
from workers.engines.build import build_engine, given_settings
from workers.engines.library.settings import Guessing
from workers.engines.trtllm.settings import GUESSING as TRTLLM
from workers.engines.trtllm.settings import TRTLLM_RULES
from workers.engines.vllm.settings import GUESSING as VLLM
from workers.engines.vllm.settings import SECOND_RUNNER, VLLM_RULES
from workers.flags import WorkerSettings
from workers.settings import SettingsError

UCX = '{"cache_transceiver_config": {"backend": "UCX"}}'
LOOKUP: dict[str, Any] = {"typed": {"speculate": "lookup"}}


@pytest.mark.parametrize("mode", ["decode", "agg"])
def test_tensorrt_llm_looks_up_on_the_gpu(mode: Any) -> None:
    loaded = TRTLLM_RULES.load(TorchLlmArgs, mode, override=UCX, **LOOKUP)
    assert loaded.settings["speculative_config"]["decoding_type"] == "SA"
    assert "speculate" not in loaded.settings
    assert "speculate=lookup (flag)" in loaded.lines()


@pytest.mark.parametrize("mode", ["decode", "agg"])
def test_vllm_looks_up_with_its_first_runner_only(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECOND_RUNNER, raising=False)
    with pytest.raises(SettingsError, match=f"flag: speculate: .*second model runner.*{SECOND_RUNNER}=0"):
        VLLM_RULES.load(AsyncEngineArgs, mode, **LOOKUP)
    VLLM_RULES.load(AsyncEngineArgs, mode)
    monkeypatch.setenv(SECOND_RUNNER, "0")
    loaded = VLLM_RULES.load(AsyncEngineArgs, mode, **LOOKUP)
    assert loaded.settings["speculative_config"]["method"] == "ngram"
    assert "speculate" not in loaded.settings


EAGLE3 = {"decoding_type": "Eagle3", "speculative_model": "h", "max_draft_len": 3}
EAGLE3_DIR = {"decoding_type": "Eagle3", "speculative_model_dir": "h", "max_draft_len": 3}
ON_PREFILL = "flag: speculate: a prefill worker generates one"
VLLM_EAGLE3 = {"method": "eagle3", "model": "h", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("load", "args", "guessing", "head"),
    [
        (TRTLLM_RULES.load, TorchLlmArgs, TRTLLM, EAGLE3),
        (TRTLLM_RULES.load, TorchLlmArgs, TRTLLM, EAGLE3_DIR),
        (VLLM_RULES.load, AsyncEngineArgs, VLLM, VLLM_EAGLE3),
    ],
    ids=["trtllm", "trtllm-alias", "vllm"],
)
def test_both_roles_may_have_a_head_and_an_aggregated_worker_any_method(
    load: Any, args: Any, guessing: Guessing, head: dict[str, object]
) -> None:
    draft, other = " ".join(map(str, head.values())), {guessing.method: "MTP"}
    for mode, config in (("prefill", head), ("decode", head), ("agg", other), ("agg", None)):
        wire = json.loads(UCX) if args is TorchLlmArgs and mode != "agg" else {}
        loaded = load(args, mode, override=json.dumps(wire | {"speculative_config": config}))
        assert loaded.settings["speculative_config"] == config
        assert guessing.draft(loaded.given) == (draft if config is head else NO_DRAFT)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--disaggregation-mode prefill --engine embedded", ON_PREFILL),
        ("--disaggregation-mode prefill --engine trtllm", ON_PREFILL),
        ("--disaggregation-mode prefill --engine vllm", ON_PREFILL),
        ("--engine mocker", "flag: speculate: 'lookup' must be left out"),
        (
            '--engine trtllm --override-engine-args {"speculative_config":{"decoding_type":"Eagle3"}}',
            ": --speculate lookup sets it; leave one of the two out",
        ),
    ],
)
def test_a_worker_and_doctor_refuse_it_where_it_cannot_work(flags: str, says: str) -> None:
    parsed = read(WorkerSettings, ["--speculate", "lookup", *flags.split()])
    for load in (build_engine, given_settings):
        with pytest.raises(SettingsError) as refused:
            load(parsed)
        assert says in str(refused.value)
