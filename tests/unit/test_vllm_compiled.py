"""What is compiled once: the kernels that the warm-up runs, and the files that all workers share."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S
from workers.engines.vllm.patches.kernels import warm_up_lengths

DOUBLES = Path(__file__).parents[1] / "doubles"


def test_workers_with_different_ports_find_the_same_compiled_files() -> None:
    """vLLM's own processes import `inside`; the double has vLLM 0.25's cache factors."""
    factors = [_factors(port, "workers.engines.vllm.inside") for port in (20_001, 20_002)]
    assert factors[0] == factors[1] == "{'VLLM_USE_AOT_COMPILE': '1'}\n"
    assert _factors(20_001, "vllm.envs") != _factors(20_002, "vllm.envs")
    unpatched = [
        _factors(port, "workers.engines.vllm.inside", BATON_VLLM_WITHOUT="compiled")
        for port in (20_001, 20_002)
    ]
    assert unpatched[0] != unpatched[1]


def _factors(port: int, imported: str, **more: str) -> str:
    code = f"import {imported}; from vllm import envs; print(envs.compile_factors())"
    variables = {
        "PYTHONPATH": os.pathsep.join([str(DOUBLES), str(DOUBLES.parents[1])]),
        "BATON_WORKER_PID": str(os.getpid()),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "VLLM_USE_AOT_COMPILE": "1",
        **more,
    }
    run = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(
        run, env=variables, capture_output=True, text=True, check=True, timeout=PATIENCE_S
    ).stdout


def test_vllm_asks_for_the_names_where_they_are_changed() -> None:
    facts = json.loads((DOUBLES / "vllm_contract.json").read_text())["compile_factors"]
    assert facts == {"called": ["envs.compile_factors"], "side_channel": ["VLLM_NIXL_SIDE_CHANNEL_PORT"]}


@pytest.mark.parametrize("num_experts", [32, 128])
@pytest.mark.parametrize("longest", [65, 274, 510, 1022, 1148, 2048, 3000, 8190, 8192, 16384, 40958])
@pytest.mark.parametrize("recorded", [0, 64, 128, 256, 512, 1024])
def test_after_the_warm_up_a_step_of_any_size_finds_its_kernels(
    num_experts: int, longest: int, recorded: int
) -> None:
    """Steps of up to `recorded` tokens run as CUDA graphs, padded to vLLM's sizes, and do not count.

    For gpt-oss vLLM records 1,024 by default.
    """
    lengths = warm_up_lengths(longest)
    assert max(lengths) == longest
    graphs = [num for num in (1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16)) if num <= recorded]
    steps = [1, *graphs, *(num for num in lengths if num > recorded)]  # 1: a prompt's second token
    seen = set().union(*(_variants(num, num_experts) for num in steps))
    missed = [num for num in range(recorded + 1, longest + 1) if not _variants(num, num_experts) <= seen]
    assert missed == []


@pytest.mark.parametrize("longest", [2, 3, 5, 64])
def test_a_short_context_is_warmed_up_to_its_end(longest: int) -> None:
    lengths = warm_up_lengths(longest)
    assert lengths == sorted(set(lengths))
    assert (lengths[0] > 0, lengths[-1]) == (True, longest)


@cache
def _variants(num_tokens: int, num_experts: int) -> set[tuple[str | int, ...]]:
    """Triton's variants of each kernel of vLLM 0.25's experts: the integers that grow with a step's tokens,
    in the launches of triton_kernels' topk.py, reduce_bitmatrix.py, routing.py and matmul_ogs.py.
    """
    rows = num_tokens * 4  # experts of each token
    block = max(16, min(128, _power_of_two_from(rows // num_experts)))
    num_blocks = -(-(rows - num_experts + 1) // block) + num_experts - 1 if rows > num_experts else rows
    partials = _variant(-(-num_tokens // 128) * 4)
    return {
        ("topk", _variant(num_tokens)),
        ("sum", _variant(num_tokens), partials),
        ("memset", _variant(2 * rows), _variant(-(-num_tokens // 32)), partials),
        ("routing", _variant(num_tokens), partials),
        ("up", block, _variant(num_tokens), _variant(num_blocks)),
        ("down", block, _variant(rows), _variant(num_blocks)),
    }


def _variant(argument: int) -> str:
    return "one" if argument == 1 else "divisible by 16" if argument % 16 == 0 else "any"


def _power_of_two_from(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
