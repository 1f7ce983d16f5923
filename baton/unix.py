"""The request plane between processes of one user on one machine, over Unix sockets."""

import asyncio
import os
import socket
import struct
from collections.abc import Callable

from baton.errors import WorkerLost
from baton.tcp import Connect, TcpTransport

_SCHEME = "unix:@"


class UnixTransport(TcpTransport):
    """`Transport` over abstract Unix sockets (Linux); addresses are `unix:@WORKER`. It connects processes of
    one user in one network namespace.
    """

    def address(self, worker_id: str) -> str:
        """Where a worker of that id is served."""
        return _SCHEME + worker_id

    def _listen(self, worker_id: str) -> tuple[socket.socket, str, str]:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind(f"\0{worker_id}")
            sock.listen()
        except OSError:
            sock.close()
            raise
        return sock, worker_id, self.address(worker_id)

    def _may_call(self, sock: socket.socket) -> bool:
        return is_own(sock)

    def _target(self, address: str) -> tuple[str, str, Connect]:
        worker = address.removeprefix(_SCHEME)
        if worker == address:
            raise WorkerLost(f"{address!r} is not the address of a Unix socket")

        async def connect(protocol: Callable[[], asyncio.Protocol]) -> None:
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.setblocking(False)
                sock.connect(f"\0{worker}")
                if not is_own(sock):
                    raise PermissionError("another user's process has this name")
                await asyncio.get_running_loop().create_unix_connection(protocol, sock=sock)
            except OSError:
                sock.close()
                raise

        return worker, address, connect


def is_own(connected: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket is this user's."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())
