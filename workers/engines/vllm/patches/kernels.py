"""Avoids recompilation in vLLM: of some kernels for every 32 tokens, of everything at every start."""

import importlib
import logging

log = logging.getLogger(__name__)

# Kernels of triton_kernels, which routes tokens to experts: module, name, and the strides that grow with a
# step's tokens. As constants they force a compilation per size, 0.4 s while clients wait. They are only added
# to addresses; https://github.com/triton-lang/triton/pull/10875 also makes them arguments.
_STRIDES = (
    ("triton_kernels.topk_details._topk_forward", "_topk_forward", {"stride_rm", "stride_rn"}),
    ("triton_kernels.reduction_details.reduce_bitmatrix", "_sum_bitmatrix_rows", {"stride_bm", "stride_bn"}),
)

# A kernel has variants for arguments that are divisible by 16 and for others, and for each of its block
# sizes. These are the first step sizes that need a new variant: among all steps, and among those too long for
# CUDA graphs of up to 64, 128, 256, 512 or, as vLLM captures for gpt-oss, 1024 tokens.
_STEPS = (
    2, 4, 9, 12, 16, 33, 34, 36, 48, 65, 73, 97, 129, 136, 137, 144, 145, 161, 257, 264, 265, 272, 280, 281,
    288, 289, 385, 386, 400, 481, 482, 513, 520, 521, 528, 544, 545, 552, 553, 560, 897, 993, 1025, 1032,
    1033, 1056, 1057, 1072, 1073, 1409, 1505, 2080, 2081, 2112, 2113,
)  # fmt: skip

# Of the second runner: log probabilities of 1, 2, up to 4, 8, 15, just 16, up to 32, with the answer's own.
WARM_UP_LOGPROBS = (0, 1, 2, 4, 8, 15, 16)


def warm_up_lengths(longest: int) -> list[int]:
    """Prompt lengths, up to `longest`, after which the kernels for every step size are compiled.

    Derived from the sources for the shapes of gpt-oss-20b and 120b (tests/unit/test_vllm_compiled.py)."""
    return [num for num in _STEPS if num < longest] + [longest]


def pass_strides() -> None:
    """Make these kernels take their strides as arguments; call it before any of them runs.

    Skips kernels that are missing or already do so."""
    try:
        if importlib.import_module("vllm.utils.import_utils").has_triton_kernels():
            for module, kernel, strides in _STRIDES:
                for parameter in getattr(importlib.import_module(module), kernel).params:
                    if parameter.name in strides:  # both are cached properties
                        vars(parameter).update(annotation="", is_constexpr=False)
    except (ImportError, AttributeError) as error:
        log.warning("kernels of new step sizes will be compiled while clients wait: %r", error)


def reuse_compiled(own: str) -> None:
    """Let workers with equal settings share compiled code: vLLM names its cache folder after its variables,
    including `own`, which differs at each start."""
    try:
        envs = importlib.import_module("vllm.envs")
        factors = envs.compile_factors
    except (ImportError, AttributeError) as error:
        log.warning("each start will compile everything again: %r", error)
    else:
        vars(envs)["compile_factors"] = lambda: {n: v for n, v in factors().items() if n != own}
