"""Kernels that take the size of a step as an argument instead of being compiled for it."""

import logging
import sys
from functools import cached_property
from types import ModuleType, SimpleNamespace

import pytest

from workers.engines.vllm.kernels import make_arguments, pass_strides

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


def _install(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> None:
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)
