"""KV transfer speed between two processes: each transceiver, and NIXL's bare READ and WRITE.

    python benchmarks/kv_transfer.py [--device cpu|cuda] [--out benchmarks/results/kv_transfer.json]

A `pull` row is a whole handoff, from `pull` to the source's confirmation, with reused staging memory. `READ`
and `WRITE` are a single posted transfer of registered memory. `cuda` moves from GPU 0 to GPU 1 (or within the
only one). The fastest round counts, as other load on the machine only adds noise."""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from workers.kv.memory import Memory, host_memory, host_view
from workers.kv.transceiver import Ticket, choose_transceiver

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
MORE_SIZES = [256 << 20, 1 << 30]
NUM_ROUNDS = 20
LIMIT_S = 20.0
READY = b"ready"
NO_RDMA = "tcp,self"


def allocate(device: str, index: int, num_bytes: int, value: int) -> Memory:
    """Memory full of `value`, on the host or on a GPU."""
    if device == "cpu":
        return host_memory(bytearray([value]) * num_bytes)
    import torch  # noqa: PLC0415  only where there are GPUs

    index %= torch.cuda.device_count()
    tensor = torch.full((num_bytes,), value, dtype=torch.uint8, device=f"cuda:{index}")
    torch.cuda.synchronize(index)
    return Memory(address=tensor.data_ptr(), num_bytes=num_bytes, device_index=index, owner=tensor)


def is_full_of(memory: Memory, value: int) -> bool:
    """Whether all bytes have arrived."""
    if memory.device_index is None:
        return host_view(memory) == bytes([value]) * memory.num_bytes
    return bool((memory.owner == value).all())  # type: ignore[attr-defined]  # a tensor


def use_transports(tls: str | None) -> None:
    """Restrict UCX in this process, before it starts."""
    os.environ.update(UCX_LOG_LEVEL="fatal", NIXL_LOG_LEVEL="FATAL")
    if tls:
        os.environ["UCX_TLS"] = tls


def offer_all(device: str, kind: str, tls: str | None, pipe: Connection, sizes: list[int]) -> None:
    """The offering process: returns a ticket for each size it receives."""

    async def serve() -> None:
        use_transports(tls)
        transceiver = choose_transceiver(kind)
        await transceiver.start()
        staging = allocate(device, 0, max(sizes), 7)
        pipe.send_bytes(READY)
        while num_bytes := await asyncio.to_thread(pipe.recv):
            ticket = transceiver.offer(staging.part(0, num_bytes))
            pipe.send_bytes(msgspec.msgpack.encode(ticket))
            await transceiver.moved(ticket)
            transceiver.withdraw(ticket)
        await transceiver.close()

    asyncio.run(serve())


def pull_all(device: str, kind: str, tls: str | None, pipe: Connection, sizes: list[int]) -> list[float]:
    """Fastest pull for each size, in seconds."""

    async def pulls() -> list[float]:
        use_transports(tls)
        transceiver = choose_transceiver(kind)
        await transceiver.start()
        staging = allocate(device, 1, max(sizes), 0)
        pipe.recv_bytes()
        fastest = []
        for num_bytes in sizes:
            rounds = []
            for _ in range(NUM_ROUNDS):
                pipe.send(num_bytes)
                ticket = msgspec.msgpack.decode(pipe.recv_bytes(), type=Ticket)
                start = time.perf_counter()
                await transceiver.pull(ticket, staging.part(0, num_bytes), LIMIT_S)
                rounds.append(time.perf_counter() - start)
            fastest.append(min(rounds))
        pipe.send(0)
        assert is_full_of(staging, 7)
        await transceiver.close()
        return fastest

    return asyncio.run(pulls())


def bare_agent(device: str, index: int, tls: str | None, num_bytes: int, value: int) -> tuple[Any, Memory]:
    """A NIXL agent with one registered piece of memory."""
    use_transports(tls)
    import nixl_cu13._api as nixl  # noqa: PLC0415  after UCX's environment

    agent = nixl.nixl_agent(f"agent-{index}", nixl.nixl_agent_config(backends=[], enable_prog_thread=False))
    agent.create_backend("UCX", {"engine_config": "CUDA_IPC_ENABLE_GET_ZCOPY=on"})
    memory = allocate(device, index, num_bytes, value)
    place = (memory.address, num_bytes, memory.device_index or 0, "")
    agent.register_memory([place], mem_type="DRAM" if device == "cpu" else "VRAM")
    return agent, memory


def target(device: str, _kind: str, tls: str | None, pipe: Connection, sizes: list[int]) -> None:
    """The passive process: drives its agent until the pipe has data."""
    agent, memory = bare_agent(device, 0, tls, max(sizes), 7)
    pipe.send((agent.get_agent_metadata(), memory.address, memory.device_index or 0))
    while not pipe.poll():
        agent.get_new_notifs()
        time.sleep(100e-6)  # NIXL sends no notifications


def initiate(device: str, operation: str, tls: str | None, pipe: Connection, sizes: list[int]) -> list[float]:
    """Fastest READ or WRITE for each size, in seconds."""
    agent, memory = bare_agent(device, 1, tls, max(sizes), 0)
    metadata, address, index = pipe.recv()
    peer = agent.add_remote_agent(metadata)
    kind = "DRAM" if device == "cpu" else "VRAM"
    fastest = []
    for num_bytes in sizes:
        here = agent.get_xfer_descs([(memory.address, num_bytes, memory.device_index or 0)], mem_type=kind)
        there = agent.get_xfer_descs([(address, num_bytes, index)], mem_type=kind)
        handle = agent.initialize_xfer(operation, here, there, peer)
        rounds = []
        for _ in range(NUM_ROUNDS):
            start = time.perf_counter()
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            assert state == "DONE"
            rounds.append(time.perf_counter() - start)
        agent.release_xfer_handle(handle)
        fastest.append(min(rounds))
    pipe.send(0)
    return fastest


def in_process(measure: Callable[..., list[float]], results: Connection, *args: Any) -> None:
    """Run one end in its own process, because UCX reads its environment once."""
    results.send(measure(*args))


def run_pair(
    passive: Callable[..., None], active: Callable[..., list[float]], what: str, args: argparse.Namespace
) -> list[float]:
    """Run both ends, each in its own process."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    results, answer = context.Pipe(duplex=False)
    kind, _, tls = what.partition(" over ")
    shared = (args.device, kind, tls or None)
    ends = (
        context.Process(target=passive, args=(*shared, far, args.sizes)),
        context.Process(target=in_process, args=(active, answer, *shared, near, args.sizes)),
    )
    for process in ends:
        process.start()
    answer.close()
    try:
        fastest: list[float] = results.recv()
    finally:
        for process in ends:
            process.join(LIMIT_S)
            process.kill()
    return fastest


def main() -> None:
    """Measure every transceiver and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    on_cpu = args.device == "cpu"
    args.sizes = SIZES if on_cpu else SIZES + MORE_SIZES
    table: dict[str, dict[str, float]] = {}
    print(f"{'GB/s (us)':<22}" + "".join(f"{size / 2**20:>16g} MiB" for size in args.sizes), flush=True)
    pulls = ["TCP", "UCX", f"UCX over {NO_RDMA}"] if on_cpu else ["UCX"]
    bare = ["READ", "WRITE", *([f"READ over {NO_RDMA}", f"WRITE over {NO_RDMA}"] if on_cpu else [])]
    for what in pulls + bare:
        if what in bare:
            fastest = run_pair(target, initiate, what, args)
        else:
            fastest = run_pair(offer_all, pull_all, what, args)
        name = what if what in bare else f"pull {what}"
        table[name] = {str(size): round(s * 1e6, 1) for size, s in zip(args.sizes, fastest, strict=True)}
        cells = [
            f"{size / s / 1e9:>11.2f} ({s * 1e6:>6.0f})" for size, s in zip(args.sizes, fastest, strict=True)
        ]
        print(f"{name:<22}" + " ".join(cells), flush=True)
    if args.out:
        results = {
            "unit": "us, fastest",
            "rounds": NUM_ROUNDS,
            "cpu": f"{os.cpu_count()} x {platform.machine()}",
        }
        args.out.write_text(json.dumps({**results, "device": args.device, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
