"""`python -m workers.engines.vllm.weights_holder SOCKET`: keeps a GPU's weights while workers come and go.

The first worker that connects loads them and gives descriptors of their memory; each other one gets these.
The holder does not use the GPU.
"""

import contextlib
import os
import socket
import struct
import sys
import threading

LOADS, MAPS = b"L", b"M"
_HEADER = struct.Struct(">II")
_AT_ONCE = 64  # descriptors in one message
_MAX_LAYOUT_BYTES, _MAX_DESCRIPTORS = 16 << 20, 4096


def send(peer: socket.socket, layout: bytes, descriptors: list[int]) -> None:
    """Send where the weights are, and their memory. Raises OSError."""
    peer.sendall(_HEADER.pack(len(layout), len(descriptors)) + layout)
    for first in range(0, len(descriptors), _AT_ONCE):
        socket.send_fds(peer, [b"."], descriptors[first : first + _AT_ONCE])


def receive(peer: socket.socket) -> tuple[bytes, list[int]]:
    """What `send` sent. Raises OSError; EOFError if the peer has ended."""
    num_bytes, num_descriptors = _HEADER.unpack(_exactly(peer, _HEADER.size))
    if num_bytes > _MAX_LAYOUT_BYTES or num_descriptors > _MAX_DESCRIPTORS:
        raise EOFError(f"{num_bytes} bytes and {num_descriptors} descriptors are too many")
    layout, descriptors = _exactly(peer, num_bytes), list[int]()
    while len(descriptors) < num_descriptors:
        _, more, _, _ = socket.recv_fds(peer, 1, _AT_ONCE)
        if not more:
            raise EOFError("the peer has ended")
        descriptors += more
    return layout, descriptors


def _exactly(peer: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        if not (more := peer.recv(num_bytes - len(data))):
            raise EOFError("the peer has ended")
        data += more
    return data


class Holder:
    """One set of weights, which the first peer loads; if that one ends before, the next one does."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_loading = False
        self._held: tuple[bytes, list[int]] | None = None

    def serve(self, listener: socket.socket) -> None:
        """For ever: each peer has a thread."""
        while True:
            peer, _ = listener.accept()
            threading.Thread(target=self._attend, args=(peer,), daemon=True).start()

    def _attend(self, peer: socket.socket) -> None:
        with self._changed:
            is_loader = self._held is None and not self._is_loading
            self._is_loading |= is_loader
        with peer, contextlib.suppress(OSError, EOFError):  # the peer has ended
            if is_loader:
                self._take(peer)
            else:
                self._give(peer)

    def _take(self, peer: socket.socket) -> None:
        held = None
        try:
            peer.sendall(LOADS)
            held = receive(peer)
        finally:
            with self._changed:
                self._held, self._is_loading = held, False
                self._changed.notify_all()

    def _give(self, peer: socket.socket) -> None:
        peer.sendall(MAPS)
        with self._changed:
            self._changed.wait_for(lambda: not self._is_loading)
            held = self._held
        if held is not None:
            send(peer, *held)


if __name__ == "__main__":
    os.umask(0o077)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(sys.argv[1])
        made.listen()
        Holder().serve(made)
