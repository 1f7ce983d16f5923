"""Doctor's checks over made-up facts: each broken set-up is found, good ones are left alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tensorrt_llm.llmapi import TorchLlmArgs

from baton.model_folder import download_command
from operations.doctor.command import text
from operations.doctor.facts import GIB, Facts
from operations.doctor.memory import halves, shortage
from operations.doctor.probes import parse_gpus, planned
from operations.doctor.table import TABLE, E, Finding, Severity, W, findings
from tests.doctor_facts import (
    B200X8,
    CONFIGS,
    MODEL_20B,
    MODEL_120B,
    SPARKS_MEMORY,
    b200_node,
    demo_with,
    given_of,
    gpu_of,
    h200_agg,
    laptop,
    model_of,
    one_gpu,
    set_of,
    smi,
    spark,
    typed_of,
    worker_of,
    worker_of_text,
)
from workers.engines.trtllm.settings import TRTLLM_RULES
from workers.flags import DisaggregationMode as Mode
from workers.settings import SettingsError

CACHE, KV = "cache_transceiver_config", "kv_cache_config"

BROKEN: list[tuple[str, str, Severity, Callable[[Facts], Facts]]] = [
    ("no driver", "gpu-none", E, lambda f: replace(f, gpus=(), gpu_problem="couldn't communicate")),
    ("another process on a GPU", "gpu-busy", W, lambda f: gpu_of(f, 6, free_bytes=120 * GIB)),
    ("range of GPUs", "gpu-list", E, lambda f: set_of(f, "prefill", gpus="0-3")),
    ("the same GPU twice", "gpu-list", E, lambda f: set_of(f, "prefill", gpus="0,1,1,2")),
    ("the same GPU by index and UUID", "gpu-list", E,
     lambda f: set_of(f, "prefill", gpus="0,1,2,GPU-00000001")),
    ("UUID of two GPUs", "gpu-list", E, lambda f: set_of(f, "decode", gpus="GPU-0000,5,6,7")),
    ("GPU 8 of 8", "gpu-list", E, lambda f: set_of(f, "decode", gpus="5,6,7,8")),
    ("shared GPU", "gpu-shared", E, lambda f: set_of(f, "decode", gpus="3,4,5,6")),
    ("both roles on one GPU without a division", "gpu-shared", E, lambda _: one_gpu(None)),
    ("two KV caches that fit alone", "memory-short", E, lambda _: one_gpu(80 * GIB)),
    ("no model folder", "model-absent", E, lambda f: model_of(f, problem="is not a folder")),
    ("missing files", "file-missing", E, lambda f: model_of(f, missing=("tokenizer.json",))),
    ("another model", "model-other", E, lambda f: model_of(f, model_type="llama")),
    ("120b on a 24 GB card", "memory-short", E,
     lambda f: gpu_of(set_of(given_of(f, "decode", {"tensor_parallel_size": 1}), "decode", gpus="7"), 7,
                    total_bytes=24 * GIB, free_bytes=23 * GIB)),
    ("flag without number", "settings-refused", E, lambda f: typed_of(f, "prefill", "--max-batch-size many")),
    ("batch typed above the graphs", "batch-graphs", W,
     lambda f: typed_of(f, "decode", "--max-batch-size 256")),
    ("list for a YAML", "settings-refused", E,
     lambda f: replace(f, workers=(worker_of_text("decode", "- max_batch_size: 128\n"),))),
    ("TP as a word", "settings-refused", E,
     lambda f: given_of(f, "decode", {"tensor_parallel_size": "four"})),
    ("no buffer", "buffer-unset", W,
     lambda f: given_of(f, "prefill", {f"{CACHE}.max_tokens_in_buffer": None})),
    ("port taken", "port-taken", E, lambda f: replace(f, port_problem="Address already in use")),
    ("wrong password", "server", E, lambda f: replace(f, servers=("NATS at nats://h: refused",))),
    ("memlock", "memlock", W, lambda f: replace(f, memlock_bytes=8 << 20)),
    ("docker's shm", "shm", E, lambda f: replace(f, shm_bytes=64 << 20)),
    ("Spark with its memory taken", "memory-short", E,
     lambda _: replace(spark(), gpus=parse_gpus(
         smi("spark_query.csv"), SPARKS_MEMORY.replace("118566368", "41943040")))),
    ("120b on a laptop", "gpu-none", E, lambda _: replace(laptop(), model=MODEL_120B)),
    ("demo model with an unknown key", "settings-refused", E, lambda _: demo_with("max_batchsize: 8")),
    ("demo model with a wrong value", "settings-refused", E, lambda _: demo_with("max_batch_size: 0")),
    ("a demo model for a GPU that is not there", "gpu-none", E,
     lambda _: set_of(laptop(), "decode", gpus="0")),
]  # fmt: skip


def _pair_of(variant: str, facts: Facts) -> Facts:
    """The variant's files instead of the default ones."""
    workers = (worker_of(w.mode, w.gpus, CONFIGS / f"{w.mode}_{variant}.yaml") for w in facts.workers)
    return replace(facts, workers=tuple(workers))


def _found(facts: Facts) -> dict[str, Finding]:
    return {finding.code: finding for finding in findings(facts)}


@pytest.mark.parametrize(
    ("code", "severity", "breaking"), [row[1:] for row in BROKEN], ids=[r[0] for r in BROKEN]
)
def test_a_broken_set_up_is_found(code: str, severity: Severity, breaking: Callable[[Facts], Facts]) -> None:
    finding = _found(breaking(b200_node()))[code]
    assert finding.severity == severity
    assert all((finding.fact, finding.breaks, finding.repair))


PREFILL = "--max-num-tokens 20000 --max-batch-size 32 --tensor-parallel-size 4"
DECODE = "--max-num-tokens 16384 --free-gpu-memory-fraction 0.9 --log-level info --expert-parallel-size 4"
GOOD: dict[str, Callable[[], Facts]] = {
    "B200": b200_node,
    "H200": h200_agg,
    "Spark": spark,
    "laptop": laptop,
    "a demo pair on a machine with GPUs": lambda: replace(laptop(), gpus=B200X8),
    "a busy GPU that the demo does not use": lambda: replace(
        laptop(), gpus=gpu_of(b200_node(), 0, free_bytes=0).gpus
    ),
    "small shm and one GPU": lambda: replace(h200_agg(), shm_bytes=64 << 20),
    "B200 over NIXL": lambda: _pair_of("nixl", b200_node()),
    "B200 with FP8 KV": lambda: _pair_of("fp8", b200_node()),
    "the guide's flags": lambda: typed_of(typed_of(b200_node(), "prefill", PREFILL), "decode", DECODE),
    "GPUs by UUID": lambda: set_of(b200_node(), "decode", gpus="GPU-00000004,GPU-00000005,6,7"),
    "two decode workers": lambda: _pair_of_decoders(b200_node()),
    "both roles on one GPU": lambda: one_gpu(40 * GIB),
    "a GPU for each role of the 20b": lambda: _pair_of_20b(b200_node()),
    "part of a GPU": lambda: set_of(h200_agg(), "agg", gpus="MIG-a1b2"),
}


def _pair_of_decoders(facts: Facts) -> Facts:
    line = "--tensor-parallel-size 2 --expert-parallel-size 2"
    halves = planned("trtllm", "decode", ["4,5", "6,7"], CONFIGS / "decode.yaml", line)
    return replace(facts, workers=(facts.workers[0], *halves))


def _pair_of_20b(facts: Facts) -> Facts:
    folder = CONFIGS.with_name("gpt-oss-20b")
    modes: tuple[Mode, ...] = ("prefill", "decode")
    both = zip(modes, "01", strict=True)
    workers = tuple(worker_of(mode, gpu, folder / f"{mode}.yaml") for mode, gpu in both)
    return replace(facts, model=MODEL_20B, workers=workers)


@pytest.mark.parametrize("facts", GOOD.values(), ids=GOOD)
def test_a_good_set_up_has_no_findings(facts: Callable[[], Facts]) -> None:
    assert findings(facts()) == []


def test_the_report_has_the_worst_first_nothing_twice_and_counts() -> None:
    facts = replace(_pair_of_decoders(b200_node()), memlock_bytes=8 << 20, port_problem="taken")
    found = findings(set_of(facts, "decode", refusal="no such key"))
    assert [finding.code for finding in found] == ["settings-refused", "port-taken", "memlock"]
    lines = text(found).splitlines()
    assert lines[-1] == "result   2 errors, 1 warning"
    assert [line.split()[0] for line in lines[::3]] == ["error", "error", "warning", "result"]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("agg_*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_configs_are_good_on_the_machine_they_are_for(path: Path) -> None:
    worker = worker_of("agg", None, path)
    facts = {"h200": h200_agg, "spark": spark}.get(path.stem.split("_")[1], b200_node)()
    gpus = ",".join(map(str, range(worker.tensor_parallel_size)))
    facts = replace(facts, workers=(replace(worker, gpus=gpus),))
    assert text(findings(facts)).splitlines()[-1] == "result   nothing found"


def test_each_row_of_the_table_is_found_somewhere() -> None:
    assert {(row.code, row.severity) for row in TABLE} == {row[1:3] for row in BROKEN}


_KEYS = sorted(
    {key for path in CONFIGS.glob("agg_*.yaml") for key in worker_of("agg", None, path).given}
    | set(worker_of("prefill", None, CONFIGS / "prefill.yaml").given)
    | {"pipeline_parallel_size", "max_beam_width", f"{KV}.max_tokens", f"{KV}.tokens_per_block"}
)
_NUMBERS = st.integers() | st.just(10**400) | st.floats()
_LEAVES = st.none() | st.booleans() | _NUMBERS | st.text() | st.lists(st.integers())

_FLAGS = st.lists(
    st.sampled_from(
        ["--max-seq-len", "--tensor-parallel-size=", "--free-gpu-memory-fraction", "0", "-1", "nan"]
    )
    | st.text(max_size=3)
).map(" ".join)


@given(st.dictionaries(st.sampled_from(_KEYS), _LEAVES), st.text("0123456789,-; GPUxMI", max_size=12), _FLAGS)
def test_nothing_given_makes_doctor_itself_fail(values: dict[str, object], gpus: str, line: str) -> None:
    facts = set_of(given_of(b200_node(), "decode", values), "decode", gpus=gpus)
    facts = typed_of(facts, "prefill", line)
    assert text(findings(facts))
    assert text(findings(given_of(facts, "prefill", values)))


def test_one_gpus_halves_fit_with_what_doctor_expects_of_each_role() -> None:
    facts = one_gpu(None)
    gpu = facts.gpus[0]
    share, kv_bytes = halves(facts, gpu).values()
    for size in (int(kv_bytes), float(kv_bytes)):  # vLLM takes whole numbers in either form
        assert text(findings(one_gpu(size))).splitlines()[-1] == "result   nothing found"
    assert 2 * share * gpu.total_bytes < gpu.free_bytes
    assert share * gpu.total_bytes > facts.model.weight_bytes + kv_bytes


def test_a_draft_model_takes_weights_and_kv_of_its_own() -> None:
    plain = one_gpu(1 << 30)
    facts = replace(plain, workers=tuple(replace(worker, draft_bytes=GIB) for worker in plain.workers))
    full = gpu_of(facts, 0, free_bytes=22 * GIB)
    with pytest.raises(ValueError, match=r"5\.0 GiB of working memory"):
        halves(full, full.gpus[0])
    assert shortage(gpu_of(plain, 0, free_bytes=22 * GIB), plain.workers[0]) is not None
    assert "13.8 GiB of weights" in str(shortage(full, facts.workers[0]))


@pytest.mark.parametrize(
    ("path", "num_layers", "size"),
    [("/gpt-oss-120b", None, "120b"), ("/GPT-OSS-20B", None, "20b"), ("/x", 24, "20b"), ("/y", None, "120b")],
)
def test_the_download_is_that_of_the_model_meant(path: str, num_layers: int | None, size: str) -> None:
    given = {"settings": "gpt-oss-120b/agg_spark.yaml", "missing": ("tokenizer.json",)}
    found = _found(model_of(b200_node(), path=path, num_layers=num_layers, **given))
    expected = f"{download_command(f'openai/gpt-oss-{size}')} --local-dir {path}"
    assert found["file-missing"].repair == expected


def test_what_the_worker_refuses_is_an_error_in_the_same_words(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text("kv_cache_config:\n\tdtype: auto")
    facts = replace(b200_node(), workers=(worker_of("prefill", "0,1,2,3", path),))
    with pytest.raises(SettingsError) as refused:
        TRTLLM_RULES.load(TorchLlmArgs, "prefill", yaml_path=path)
    assert _found(facts)["settings-refused"].fact == f"prefill: {refused.value}"
    for head, fact in (("o/h", "to download it: hf download o/h"), ("./h", "model: h is not a folder")):
        text = f"speculative_config: {{method: eagle3, model: {head}}}"
        assert fact in str(worker_of_text("prefill", text, "vllm").refusal)
        assert worker_of_text("agg", text, "vllm").refusal is None
