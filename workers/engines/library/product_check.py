"""`python -m workers.engines.library.product_check MODEL_PATH`: whether a GPU's matrix products are whole.

Where MPS leaves a process a part of the SMs, cuBLAS 13.1 leaves parts of its results unwritten with most
numbers of SMs (docs/gpu-runs.md). A worker with such a share runs this before it loads, in a process of its
own, since one that has used the GPU keeps memory there."""

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch

Product = Callable[[torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor], object]
"""Writes rows @ weight.T, plus a bias or none: `product(bias, rows, weight, out)`."""
_NUM_ROWS = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 33, 48, 64, 100, 128, 129, 200, 256, 257, 512, 700]
_NUM_ROWS += [1024, 2048, 4096, 8192]
_MAX_VALUES = 2**26
"""Of a result: larger ones are left out, since a step takes the logits of few of its tokens."""
_BIAS = 64
"""As the sizes of gpt-oss, a multiple of 64 below 2**14: sums of ones are exact in bfloat16."""


class Shape(msgspec.Struct, frozen=True):
    """Of config.json."""

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_local_experts: int

    def weights(self) -> dict[str, tuple[int, int]]:
        """[outputs, inputs] of the dense weights, by name."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {
            "lm_head": (self.vocab_size, self.hidden_size),
            "qkv_proj": (queries + 2 * keys, self.hidden_size),
            "o_proj": (self.hidden_size, queries),
            "router": (self.num_local_experts, self.hidden_size),
        }


def multiply(bias: torch.Tensor | None, rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """On a GPU, by cuBLAS."""
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


def incomplete(shape: Shape, device: str, product: Product = multiply) -> Iterator[str]:
    """Each product of ones that has a wrong value, or one unwritten, in words."""

    def full(value: float, *size: int) -> torch.Tensor:
        return torch.full(size, value, dtype=torch.bfloat16, device=device)

    for name, (num_outputs, num_inputs) in shape.weights().items():
        weight, bias = full(1, num_outputs, num_inputs), full(_BIAS, num_outputs)
        for num_rows in _NUM_ROWS:
            if num_rows > 1 and num_rows * num_outputs > _MAX_VALUES:
                break
            for added in (None, bias):
                out = full(float("nan"), num_rows, num_outputs)
                product(added, full(1, num_rows, num_inputs), weight, out)
                if bool((out != num_inputs + (0 if added is None else _BIAS)).any()):
                    yield f"{name}, {num_rows} tokens{'' if added is None else ', with a bias'}"


def verdict(model_path: Path) -> str | None:
    """A sentence, if a product is not whole or there is no GPU to try."""
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU to use with this share; unset it, or see nvidia-smi"
    shape = msgspec.json.decode((model_path / "config.json").read_bytes(), type=Shape)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    if not (found := list(incomplete(shape, "cuda"))):
        return None
    try:
        cublas = version("nvidia-cublas")
    except PackageNotFoundError:
        cublas = f"of CUDA {torch.version.cuda}"
    return (
        f"on {num_sms} SMs, cuBLAS {cublas} leaves {len(found)} kinds of matrix products incomplete "
        f"({found[0]}), so answers would be wrong; give another share, 100, or nvidia-cublas>=13.10"
    )


if __name__ == "__main__":
    sys.exit(verdict(Path(sys.argv[1])))
