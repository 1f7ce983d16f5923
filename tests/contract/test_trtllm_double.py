"""TensorRT-LLM's double against the recorded facts of the real one, including its traps."""

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pydantic
import pytest
import tensorrt_llm
from tensorrt_llm.llmapi import LLM, TorchLlmArgs, llm_args
from tensorrt_llm.traps import sprung

ROOT = Path(__file__).parents[2]
FACTS = json.loads((ROOT / "tests/doubles/trtllm_contract.json").read_text())


V2 = {"kv_cache_config": {"use_kv_cache_manager_v2": True}}


@pytest.mark.parametrize("name", ["SamplingParams", "DisaggregatedParams", "GuidedDecodingParams"])
def test_the_doubles_dataclasses_are_the_recorded_ones(name: str) -> None:
    cls = getattr(tensorrt_llm.llmapi, name)
    assert {f.name: f.default for f in dataclasses.fields(cls)} == {
        field: fact["default"] for field, fact in FACTS[name].items()
    }
    with pytest.raises(TypeError):
        cls(no_such_field=1)


@pytest.mark.parametrize("name", ["TorchLlmArgs", "KvCacheConfig", "CacheTransceiverConfig"])
def test_the_doubles_settings_are_the_recorded_ones_and_refuse_others(name: str) -> None:
    cls = getattr(llm_args, name)
    recorded = (FACTS["BaseLlmArgs"] if name == "TorchLlmArgs" else {}) | FACTS[name]
    plain = {
        k: f["default"] for k, f in recorded.items() if not str(f["default"]).endswith((")", "required>"))
    }
    assert set(cls.model_fields) == set(recorded)
    assert {key: cls.model_fields[key].default for key in plain} == plain
    with pytest.raises(pydantic.ValidationError):
        cls(**({"model": "m"} if name == "TorchLlmArgs" else {}), no_such_key=1)
    assert not set(FACTS["refused_keys"]) & set(TorchLlmArgs.model_fields)


@pytest.mark.parametrize("name", ["__init__", "generate_async"])
def test_the_doubles_signatures_are_the_recorded_ones(name: str) -> None:
    recorded = re.sub(r"\[> rc\d+\]", "", FACTS["LLM"][name]).strip("()").replace("**kwargs", "kwargs")
    signature = inspect.signature(getattr(LLM, name))
    found = [
        parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
        for parameter in signature.parameters.values()
        if parameter.name != "self"
    ]
    assert found == [part.strip().replace('"', "'") for part in recorded.split(",")]


def test_tensorrt_llm_is_imported_in_one_file_only() -> None:
    imports = re.compile(r"^\s*(from|import) tensorrt_llm|import_module\(\"tensorrt_llm", re.MULTILINE)
    found = [path.name for path in (ROOT / "workers").rglob("*.py") if imports.search(path.read_text())]
    assert found == ["library.py"]


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"no_such_key": 1}, ValueError),
        ({"kv_cache_config": {"no_such_key": 1}}, pydantic.ValidationError),
        ({"cache_transceiver_config": {"backend": "ucx"}}, pydantic.ValidationError),
        ({"cuda_graph_config": {"mode": "both"}}, pydantic.ValidationError),
        ({"cuda_graph_config": {"batch_sizes": [1, 4], "max_batch_size": 8}}, pydantic.ValidationError),
        ({"kv_cache_config": {"free_gpu_memory_fraction": None}}, TypeError),
        (V2 | {"cache_transceiver_config": {"backend": "UCX"}}, RuntimeError),
        ({"cache_transceiver_config": {"backend": "UCX", "transceiver_runtime": "PYTHON"}}, RuntimeError),
    ],
)
def test_the_double_refuses_what_tensorrt_llm_refuses(
    checkpoint: Path, config: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        LLM(str(checkpoint), **config)


NIXL: dict[str, Any] = {"backend": "NIXL"}
UCX: dict[str, Any] = {"backend": "UCX"}
CPP: dict[str, Any] = {"transceiver_runtime": "CPP"}
V1 = {"kv_cache_config": {"use_kv_cache_manager_v2": False}}


@pytest.mark.parametrize(
    ("build", "config", "works"),
    [
        ("1.3.0rc29", {"cache_transceiver_config": UCX}, True),
        ("1.4.0rc1", {"cache_transceiver_config": UCX}, False),  # its default is Python and V2 (#17495)
        ("1.4.0rc1", {"cache_transceiver_config": UCX | CPP}, False),
        ("1.4.0rc1", {"cache_transceiver_config": UCX | CPP} | V1, True),
        ("1.4.0rc1", {"cache_transceiver_config": NIXL}, True),
        ("1.4.0rc1", {"cache_transceiver_config": NIXL} | V2, True),
    ],
)
def test_the_double_has_each_releases_transceivers(
    checkpoint: Path, build: str, config: dict[str, Any], works: bool
) -> None:
    with sprung(build=build):
        if not works:
            with pytest.raises((RuntimeError, pydantic.ValidationError)):
                LLM(str(checkpoint), **config)
        else:
            LLM(str(checkpoint), **config).shutdown()
