"""A process with a small model whose weights it loads or maps, as `patches.weights` does in vLLM:
`python -m tests.gpu.shared_weights_peer SOCKET`.

Each line on stdin is answered by one with the model's output, `write` after an attempt to change the weights.
"""

import logging
import socket
import sys
import time

import torch

from workers.engines.vllm.patches import virtual_memory as memory
from workers.engines.vllm.patches import weights
from workers.engines.vllm.weights_holder import LOADS

WIDTH = 4096


class Model(torch.nn.Module):
    """Layers of 32 MiB, and small tensors beside them."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("cuda"):
            self.layers = [torch.nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(8)]
        for number, layer in enumerate(self.layers):
            self.add_module(str(number), layer)

    @torch.no_grad()
    def load(self) -> None:
        """Weights that depend on nothing else."""
        generator = torch.Generator("cuda").manual_seed(7)
        for layer in self.layers:
            layer.weight.normal_(0, 0.01, generator=generator)
            layer.bias.normal_(0, 0.01, generator=generator)

    @torch.no_grad()
    def process(self) -> None:
        """New tensors in the place of the loaded ones, with temporary ones meanwhile."""
        for layer in self.layers:
            scaled = layer.weight * 2
            layer.weight = torch.nn.Parameter(scaled + layer.weight, requires_grad=False)

    @torch.no_grad()
    def output(self) -> str:
        """A checksum that depends on all weights."""
        values = torch.ones(1, WIDTH, device="cuda", dtype=torch.bfloat16)
        for layer in self.layers:
            values = layer(values)
        return str(float(values.float().sum()))


def try_driver() -> None:
    """Each call on its own, so that a driver that lacks one shows."""
    size = 32 << 20
    address, handle = memory.reserve(size), memory.create(size)
    sys.stderr.write(f"reserved {address:#x}, created {handle:#x}\n")
    memory.map_at(address, size, handle)
    descriptor = memory.exported(handle)
    again, other = memory.imported(descriptor), memory.reserve(size)
    memory.map_at(other, size, again)
    memory.copy(address, other, size >> 1)
    memory.wait()
    sys.stderr.write(f"mapped twice, descriptor {descriptor}\n")
    memory.freeze(other, size)
    memory.unmap(other, size)
    sys.stderr.write("frozen, unmapped\n")


def main(path: str) -> None:
    """Until stdin ends."""
    torch.zeros(1, device="cuda")
    free, total = torch.cuda.mem_get_info()
    sys.stderr.write(f"{free >> 20} of {total >> 20} MiB free\n")
    try_driver()
    with socket.socket(socket.AF_UNIX) as holder:
        holder.connect(path)
        is_loader = holder.recv(1) == LOADS
        pool = weights.Pool(is_real=is_loader)
        model: Model = pool.wraps(Model)()
        began = time.monotonic()
        if is_loader:
            model.load()
        pool.wraps(model.process)()
        weights.exchange(holder, pool, model, is_loader=is_loader)
        took_s = time.monotonic() - began
    free, total = torch.cuda.mem_get_info()
    sys.stdout.write(
        f"{'loaded' if is_loader else 'mapped'} {took_s:.3f} s, {(total - free) >> 20} MiB in use\n"
    )
    sys.stdout.flush()
    for line in sys.stdin:
        if line.strip() == "write":
            with torch.no_grad():
                model.layers[0].weight.fill_(1)
                torch.cuda.synchronize()
        sys.stdout.write(model.output() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main(sys.argv[1])
