"""What is compiled once: the kernels that the warm-up runs, and the files that all workers share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S
from workers.engines.vllm.patches.kernels import warm_up_lengths

DOUBLES = Path(__file__).parents[1] / "doubles"


def test_workers_with_different_ports_find_the_same_compiled_files() -> None:
    """vLLM's own processes import `inside`; the double has vLLM's cache factors."""
    factors = [_factors(port, "workers.engines.vllm.inside") for port in (20_001, 20_002)]
    assert factors[0] == factors[1] == "{'VLLM_USE_AOT_COMPILE': '1'}\n"
    unpatched = _factors(20_001, "workers.engines.vllm.inside", BATON_VLLM_WITHOUT="compiled")
    assert "20001" in unpatched


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


@pytest.mark.parametrize("longest", [2, 3, 5, 64])
def test_a_short_context_is_warmed_up_to_its_end(longest: int) -> None:
    lengths = warm_up_lengths(longest)
    assert lengths == sorted(set(lengths))
    assert (lengths[0] > 0, lengths[-1]) == (True, longest)
