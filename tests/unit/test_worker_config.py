"""A worker's flags: its role, its names, and which flags set engine settings."""

from pathlib import Path
from typing import Literal

import pytest

from baton.flags import parse
from baton.messages import Role
from workers.config import WorkerSettings, typed_engine_flags


@pytest.mark.parametrize(
    ("mode", "role", "route"),
    [
        ("prefill", Role.PREFILL, "dyn://dynamo.prefill.generate"),
        ("decode", Role.DECODE, "dyn://dynamo.tensorrt_llm.generate"),
        ("agg", Role.DECODE, "dyn://dynamo.tensorrt_llm.generate"),
    ],
)
def test_the_mode_says_role_and_endpoint(
    mode: Literal["prefill", "decode", "agg"], role: Role, route: str
) -> None:
    settings = WorkerSettings(disaggregation_mode=mode)
    assert (settings.role, settings.route) == (role, route)


def test_names_that_are_given_count_more_than_those_that_follow() -> None:
    plain = WorkerSettings(model_path=Path("models/demo"))
    assert (plain.model, plain.drain_timeout_s) == ("demo", 30.0)
    named = WorkerSettings(served_model_name="openai/gpt-oss-120b", endpoint="dyn://a.b.c")
    assert (named.model, named.route) == ("openai/gpt-oss-120b", "dyn://a.b.c")


def test_an_endpoint_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="dyn://namespace"):
        WorkerSettings(endpoint="http://a.b.c")


def test_flags_that_were_typed_are_settings_of_the_engine_and_no_others() -> None:
    argv = [
        "--max-batch-size=1", "--max-num-tokens=2", "--max-seq-len=3", "--free-gpu-memory-fraction=0.4",
        "--tensor-parallel-size=5", "--expert-parallel-size=6",
    ]  # fmt: skip
    typed = {
        "max_batch_size": 1, "max_num_tokens": 2, "max_seq_len": 3, "tensor_parallel_size": 5,
        "kv_cache_config.free_gpu_memory_fraction": 0.4, "moe_expert_parallel_size": 6,
    }  # fmt: skip

    def engine_flags(*given: str) -> dict[str, object]:
        return typed_engine_flags(parse(WorkerSettings, given, prog="p", description="d", environ={}))

    assert engine_flags(*argv) == typed
    assert engine_flags() == {}
    assert engine_flags("--max-seq-len=3") == {"max_seq_len": 3}
