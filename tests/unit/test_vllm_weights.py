"""Weights that one process loads and others map, with the host's memory as the GPU's; and their holder."""

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.doubles import host_as_gpu
from tests.waiting import PATIENCE_S
from workers.engines.vllm import weights_holder
from workers.engines.vllm.patches import weights
from workers.engines.vllm.weights_holder import LOADS, MAPS, receive, send

MIB = 1 << 20
Connect = Callable[[], socket.socket]


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    """Makes connections to a holder."""
    made: list[socket.socket] = []

    def connect() -> socket.socket:
        made.append(peer := socket.socket(socket.AF_UNIX))
        peer.settimeout(PATIENCE_S)
        peer.connect(str(tmp_path / "holder"))
        return peer

    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "holder"))
    listener.listen()
    threading.Thread(target=weights_holder.Holder().serve, args=(listener,), daemon=True).start()
    yield connect
    for peer in made:
        peer.close()


class _Pool(weights.Pool):
    """Without PyTorch's allocator, which a CPU lacks; `freed` are addresses without a tensor."""

    def _made(self) -> torch.cuda.MemPool:
        self.freed: set[int] = set()
        return None  # type: ignore[return-value]  # not used here

    def _taken(self) -> set[int]:
        return {segment.address for segment in self.segments} - self.freed

    def tensor(self, num_bytes: int) -> torch.Tensor:
        """One that fills a segment."""
        memory = (ctypes.c_char * num_bytes).from_address(self._allocate(num_bytes, 0, 0))
        return torch.frombuffer(memory, dtype=torch.float32)


class _Model(torch.nn.Module):
    small: torch.Tensor

    def __init__(self, pool: _Pool, large_mib: int = 70) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(pool.tensor(large_mib * MIB), requires_grad=False)
        pool.tensor(6 * MIB)
        pool.freed.add(pool.segments[-1].address)
        self.register_buffer("small", pool.tensor(2 * MIB))


def _load(peer: socket.socket, large_mib: int = 70) -> _Model:
    """As vLLM's process does."""
    is_loader = peer.recv(1) == LOADS
    pool = _Pool(is_real=is_loader)
    model = _Model(pool, large_mib)
    with torch.no_grad():
        model.large.copy_(torch.arange(model.large.numel()) if is_loader else torch.tensor(3.0))
        model.small.fill_(5 if is_loader else 9)
    weights.exchange(peer, pool, model, is_loader=is_loader)
    return model


@pytest.fixture(autouse=True)
def _host_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "memory", host_as_gpu)


def test_a_process_that_loads_nothing_has_the_weights_of_the_one_that_did(connect: Connect) -> None:
    loader, other = connect(), connect()
    with ThreadPoolExecutor() as pool:
        models = list(pool.map(_load, (loader, other)))
    first, second = models
    assert torch.equal(second.large, first.large)
    assert float(second.large[1234567]) == 1234567
    assert set(second.small.tolist()) == {5}
    first.small.fill_(6)  # a layer's own state
    assert set(second.small.tolist()) == {5}


def test_weights_outlive_their_loader_and_are_not_read_again(connect: Connect) -> None:
    with closing(connect()) as loader:
        _load(loader)
    for _ in range(2):
        with closing(connect()) as other:
            assert float(_load(other).large[1234567]) == 1234567


def test_other_weights_are_refused_in_a_sentence(connect: Connect) -> None:
    _load(connect())
    with pytest.raises(RuntimeError, match=r"lie differently: sizes: 3 and 3, the first different ones"):
        _load(connect(), large_mib=72)


def test_if_the_loader_ends_before_it_has_loaded_the_next_one_loads(connect: Connect) -> None:
    loader, waiting = connect(), connect()
    assert (loader.recv(1), waiting.recv(1)) == (LOADS, MAPS)
    loader.close()
    with pytest.raises(EOFError):
        receive(waiting)
    assert connect().recv(1) == LOADS


def test_many_descriptors_stay_in_order(connect: Connect) -> None:
    loader, other = connect(), connect()
    assert (loader.recv(1), other.recv(1)) == (LOADS, MAPS)
    handles = [host_as_gpu.create(size) for size in range(1, 201)]
    send(loader, b"x" * MIB, handles)
    layout, descriptors = receive(other)
    assert layout == b"x" * MIB
    assert [os.fstat(descriptor).st_size for descriptor in descriptors] == list(range(1, 201))
    for handle in (*handles, *descriptors):
        os.close(handle)


def test_more_than_weights_can_have_is_not_read(connect: Connect) -> None:
    loader = connect()
    assert loader.recv(1) == LOADS
    loader.sendall(b"\xff" * 8)
    assert loader.recv(1) == b""
    assert connect().recv(1) == LOADS
