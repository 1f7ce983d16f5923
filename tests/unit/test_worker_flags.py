"""A worker's flags: its role, its names, and which flags set engine settings."""

import pytest

from baton.connect import Wires
from baton.flags import parse, read
from baton.messages import Role
from workers.flags import DisaggregationMode, WorkerSettings, typed_engine_flags


@pytest.mark.parametrize(
    ("mode", "role", "component", "dynamos"),
    [
        ("prefill", Role.PREFILL, "prefill", "prefill"),
        ("decode", Role.DECODE, "tensorrt_llm", "backend"),
        ("agg", Role.DECODE, "tensorrt_llm", "backend"),
    ],
)
def test_the_mode_says_role_and_endpoint(
    mode: DisaggregationMode, role: Role, component: str, dynamos: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = WorkerSettings(disaggregation_mode=mode)
    assert (settings.role, settings.route) == (role, f"dyn://dynamo.{component}.generate")
    monkeypatch.setenv("DYN_NAMESPACE", "mine")
    settings = WorkerSettings(disaggregation_mode=mode, wires=Wires(request_plane="dynamo"))
    assert settings.route == f"dyn://mine.{dynamos}.generate"


def test_an_endpoint_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="dyn://namespace"):
        WorkerSettings(endpoint="http://a.b.c")


@pytest.mark.parametrize("name", ["a b", "-x", "a\n", "x" * 64, "d{0}", "décode", "a/b", '"'])
def test_a_name_that_would_not_fit_a_label_is_refused_in_one_sentence(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(WorkerSettings, [f"--name={name}"], prog="workers", description="")
    error = capsys.readouterr().err
    assert error.startswith("error: --name ")
    assert error.count("\n") == 1


def test_flags_that_were_typed_are_settings_of_the_engine_and_no_others() -> None:
    argv = [
        "--max-batch-size=1", "--max-num-tokens=2", "--max-seq-len=3", "--free-gpu-memory-fraction=0.4",
        "--tensor-parallel-size=5", "--expert-parallel-size=6", "--max-queue-size=7",
    ]  # fmt: skip
    typed = {
        "max_batch_size": 1, "max_num_tokens": 2, "max_seq_len": 3, "tensor_parallel_size": 5,
        "kv_cache_config.free_gpu_memory_fraction": 0.4, "moe_expert_parallel_size": 6, "max_queue_size": 7,
    }  # fmt: skip

    def engine_flags(*given: str) -> dict[str, object]:
        return typed_engine_flags(read(WorkerSettings, given))

    assert engine_flags(*argv) == typed
    assert engine_flags() == {}
    assert engine_flags("--max-seq-len=3") == {"max_seq_len": 3}
