"""Random weights that make answers depend on the whole prompt, as a vLLM plugin.

vLLM's dummy weights (`load_format: dummy`) are within 0.001, norms included, and the experts' are zero:
answers hardly depend on the prompt's KV, so equal answers would prove nothing. With weights as large as a
trained model's, rounding grows from layer to layer until no answer repeats."""

import importlib
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch

_STD = {
    "embedding": 1.0,
    "qkv_proj": 0.013,  # nearly uniform attention: shared signal grows with depth,
    "o_proj": 0.02,  # rounding errors do not
    "router": 0.1,  # the last expert weighs little, as rounding may choose another
    "lm_head": 0.02,
}
ONLY = "BATON_RANDOM_WEIGHTS_ONLY"
"""The tokens that answers have, separated by commas; not set: all."""
# 2 ** (exponent - 127) scales random 4-bit floats, whose standard deviation is 2.9.
_EXPONENTS = {"w13_weight_scale": 120, "w2_weight_scale": 114}
_DRAWN = 2**16  # at once: more would depend on the number of SMs, if MPS leaves a process fewer than 32


def install(folder: Path) -> Path:
    """Write the plugin into `folder`, to put on the PYTHONPATH of vLLM's processes."""
    info = folder / "baton_random_weights-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: baton-random-weights\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nbaton_random_weights = baton_random_weights:register\n"
    )
    shutil.copy(__file__, folder / "baton_random_weights.py")
    return folder


def register() -> None:
    """Entry point, called in each of vLLM's processes."""
    loader = importlib.import_module("vllm.model_executor.model_loader.dummy_loader")
    loader.DummyModelLoader.load_weights = _load_weights


def _load_weights(_: Any, model: torch.nn.Module, model_config: Any) -> None:
    if any(Path(model_config.model).glob("*.safetensors")):  # a head, which has weights
        config = importlib.import_module("vllm.config.load").LoadConfig()
        loader = importlib.import_module("vllm.model_executor.model_loader.default_loader")
        loader.DefaultModelLoader(config).load_weights(model, model_config)
        return
    num_shards = importlib.import_module("vllm.distributed").get_tensor_model_parallel_world_size()
    config = model_config.hf_config
    for name, tensor in model.state_dict().items():
        if tensor.dim():
            generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode()))
            fill(name, tensor, generator, config.hidden_size, config.intermediate_size // num_shards)


@torch.no_grad()
def fill(name: str, tensor: torch.Tensor, generator: torch.Generator, hidden: int, intermediate: int) -> None:
    """Random values for the parameter `name`; padding of experts, beyond these sizes, stays zero."""
    kind = name.rpartition(".")[2]
    if kind in _EXPONENTS:
        num_rows, num_in = (2 * intermediate, hidden) if kind[:3] == "w13" else (hidden, intermediate)
        tensor[:, :num_rows, : num_in // 32] = _EXPONENTS[kind]
    elif tensor.dtype == torch.uint8:
        for part in torch.split(tensor.view(-1), _DRAWN):
            part.random_(0, 256, generator=generator)
    elif not tensor.is_floating_point():
        return  # the expert map
    elif name.endswith(("bias", "sinks")):
        tensor.zero_()
    elif tensor.dim() == 1:
        tensor.fill_(1)  # a norm
    else:
        (std,) = (std for part, std in _STD.items() if part in name)
        for part in torch.split(tensor.view(-1), _DRAWN):
            part.normal_(0, std, generator=generator)
        if "lm_head" in name and os.environ.get(ONLY):
            keep_rows(tensor, list(map(int, os.environ[ONLY].split(","))))


def keep_rows(lm_head: torch.Tensor, tokens: list[int]) -> None:
    """Make answers consist of these tokens: the others have logits of 0, far below the best of these."""
    kept = lm_head[tokens] * 20
    lm_head.zero_()
    lm_head[tokens] = kept
