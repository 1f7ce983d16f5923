"""Kernels that take the size of a step as an argument instead of being compiled for it."""

import logging
import sys
from functools import cache, cached_property
from types import ModuleType, SimpleNamespace

import pytest

from workers.engines.vllm.kernels import make_arguments, pass_strides, reuse_compiled, warm_up_lengths

MODULES = {
    "triton_kernels.topk_details._topk_forward": "_topk_forward",
    "triton_kernels.reduction_details.reduce_bitmatrix": "_sum_bitmatrix_rows",
}


class Parameter:
    """Triton's `KernelParam`, as far as it tells constants from arguments."""

    def __init__(self, name: str, given: str) -> None:
        self.name = name
        self._given = given

    @cached_property
    def annotation(self) -> str:
        return self._given

    @cached_property
    def is_constexpr(self) -> bool:
        return "constexpr" in self.annotation


class Kernel:
    """Triton's `JITFunction`: it has looked at its constants once when it is made."""

    def __init__(self, *constants: str) -> None:
        self.params = [Parameter(name, "constexpr") for name in constants] + [Parameter("n_rows", "")]
        assert self.constants() == set(constants)

    def constants(self) -> set[str]:
        return {parameter.name for parameter in self.params if parameter.is_constexpr}


def test_named_constants_become_arguments_and_no_others() -> None:
    kernel = Kernel("stride_rm", "stride_rn", "BLOCK_M")
    make_arguments(kernel, {"stride_rm", "stride_rn", "stride_of_another_version"})
    assert kernel.constants() == {"BLOCK_M"}
    assert [parameter.annotation for parameter in kernel.params] == ["", "", "constexpr", ""]


def test_both_kernels_that_vllm_brings_take_their_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {
        "_topk_forward": Kernel("stride_rm", "stride_rn", "BLOCK_M"),
        "_sum_bitmatrix_rows": Kernel("stride_bm", "stride_bn", "stride_pm", "BLOCK_MM"),
    }
    _install(monkeypatch, "vllm.utils.import_utils", has_triton_kernels=lambda: True)
    for module, name in MODULES.items():
        _install(monkeypatch, module, **{name: kernels[name]})
    pass_strides()
    assert kernels["_topk_forward"].constants() == {"BLOCK_M"}
    assert kernels["_sum_bitmatrix_rows"].constants() == {"stride_pm", "BLOCK_MM"}


def test_a_build_without_them_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _install(monkeypatch, "vllm.utils.import_utils", has_triton_kernels=lambda: False)
    with caplog.at_level(logging.WARNING):
        pass_strides()
    assert not caplog.records


def test_a_build_with_others_is_told_and_runs_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _install(monkeypatch, "vllm.utils.import_utils", has_triton_kernels=lambda: True)
    _install(monkeypatch, "triton_kernels.topk_details._topk_forward", other=SimpleNamespace())
    with caplog.at_level(logging.WARNING):
        pass_strides()
    assert "compiled while clients wait" in caplog.text


def test_what_was_compiled_is_found_by_whoever_has_another_port(monkeypatch: pytest.MonkeyPatch) -> None:
    factors = {"VLLM_NIXL_SIDE_CHANNEL_PORT": 20_001, "VLLM_USE_AOT_COMPILE": True}
    _install(monkeypatch, "vllm.envs", compile_factors=lambda: factors)
    reuse_compiled({"VLLM_NIXL_SIDE_CHANNEL_PORT"})
    assert sys.modules["vllm.envs"].compile_factors() == {"VLLM_USE_AOT_COMPILE": True}


def test_a_build_that_names_what_it_compiles_otherwise_is_told_and_runs_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _install(monkeypatch, "vllm.envs")
    with caplog.at_level(logging.WARNING):
        reuse_compiled({"VLLM_NIXL_SIDE_CHANNEL_PORT"})
    assert "each start will compile everything again" in caplog.text


def _install(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("num_experts", [32, 128])
@pytest.mark.parametrize("longest", [1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("recorded", [0, 64, 128, 256, 512])
def test_after_the_warm_up_a_step_of_any_size_finds_its_kernels(
    num_experts: int, longest: int, recorded: int
) -> None:
    """Steps of up to `recorded` tokens run as CUDA graphs, padded to vLLM's sizes: their own do not count."""
    lengths = warm_up_lengths(longest)
    assert max(lengths) == longest
    graphs = [num for num in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if num <= recorded]
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
    """Triton's variants of each kernel of vLLM 0.25's experts: from each launch in triton_kernels' topk.py,
    reduce_bitmatrix.py, routing.py and matmul_ogs.py the integers that grow with the tokens of a step.
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
