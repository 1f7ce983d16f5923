"""Request checks and seeds of the engines, and facts of the third-party ones' models."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.errors import InvalidRequest
from baton.messages import GenerateRequest, Sampling
from tests.requests import token_request
from tests.tiny_gpt_oss import write_checkpoint
from workers.engines.library.model_facts import read_model_facts
from workers.engines.requests import check_request


def ask(num_tokens: int = 5, **fields: Any) -> GenerateRequest:
    token_ids = fields.pop("token_ids", range(num_tokens))
    return token_request(token_ids, **{"max_tokens": 4, "deadline_s": 9.0} | fields)


QUANTIZED = {"quantization": {"kv_cache_quant_algo": "FP8"}}


@pytest.mark.parametrize(
    ("config", "files", "kv_dtype", "eos"),
    [
        ({}, {}, "bfloat16", -1),
        ({"torch_dtype": "float16"}, {}, "float16", -1),
        ({"torch_dtype": "float16", "dtype": "float32"}, {}, "float32", -1),
        ({"torch_dtype": "float16"}, {"hf_quant_config": QUANTIZED}, "fp8", -1),
        ({"eos_token_id": 3}, {}, "bfloat16", 3),
        ({"eos_token_id": 3}, {"generation_config": {"eos_token_id": [4, 5]}}, "bfloat16", 4),
        ({"eos_token_id": 3}, {"generation_config": {"eos_token_id": 0}}, "bfloat16", 0),
        ({"eos_token_id": [6, 7]}, {"generation_config": {"eos_token_id": []}}, "bfloat16", 6),
    ],
)
def test_type_of_kv_and_stop_token_are_those_of_the_checkpoints_files(
    config: dict[str, Any], files: dict[str, Any], kv_dtype: str, eos: int, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path)
    path = checkpoint / "config.json"
    plain = {
        k: v for k, v in json.loads(path.read_text()).items() if not k.endswith(("dtype", "eos_token_id"))
    }
    path.write_text(json.dumps(plain | config))
    for name, content in files.items():
        (checkpoint / f"{name}.json").write_text(json.dumps(content))
    tokens = [{"id": 7, "content": "<|call|>", "special": True}, {"id": 8, "content": "call"}]
    (checkpoint / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    facts = read_model_facts(checkpoint)
    assert (facts.kv_dtype, facts.eos_token_id, facts.control_ids) == (kv_dtype, eos, {"<|call|>": 7})


@pytest.mark.parametrize("name", ["config", "generation_config", "hf_quant_config", "tokenizer"])
def test_a_broken_file_is_named(name: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    (checkpoint / f"{name}.json").write_text("{")
    with pytest.raises(ValueError, match=rf"{name}\.json: "):
        read_model_facts(checkpoint)


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (ask(0), "prompt is empty"),
        (ask(5, num_generated=5, max_tokens=9), "prompt is empty"),
        (ask(20), "20 tokens.*context length of 20"),
        (ask(5, num_generated=-1), "negative"),
        (ask(5, num_generated=4), "max_tokens is 4; 4"),
        (ask(max_tokens=0), "max_tokens is 0"),
        (ask(choice=-1), "negative"),
        (ask(logprobs=-1), "negative"),
        (ask(prompt_logprobs=0, max_tokens=2), "prompt_logprobs .* one token"),
        (ask(token_ids=[1, 100]), "token id 100 .* vocabulary of 100"),
        (ask(token_ids=[-1]), "token id -1"),
        (ask(logit_bias={100: 1.0}), "token id 100"),
        (ask(stop_token_ids=(100,)), "token id 100"),
    ],
)
def test_what_an_engine_would_break_on_is_refused(request_: GenerateRequest, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        check_request(request_, vocab_size=100, context_length=20)
    is_of_length = "max_tokens is" in says or "prompt_logprobs" in says
    assert refused.value.param == ("max_tokens" if is_of_length else None)


def test_each_choice_and_each_attempt_has_a_seed_of_its_own_and_the_first_the_requests() -> None:
    sampling = Sampling(max_tokens=4, seed=2**63 - 1)
    assert sampling.seed_of_attempt(0) == 2**63 - 1
    others = {
        msgspec.structs.replace(sampling, choice=choice).seed_of_attempt(num_generated)
        for choice in range(16)
        for num_generated in range(64)
    }
    assert len(others) == 16 * 64
    assert all(0 <= seed < 2**63 for seed in others)
