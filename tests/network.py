"""A private IP network between real processes, whose packets a switch drops, repeats or corrupts on demand.

Each host is a network namespace with one TUN device. It needs root and Linux, but no kernel module such as
netem, and no address of the machine is touched. The switch is a process of its own:
`python -m tests.network SUBNET TUN...`, with an open file for each host."""

import contextlib
import fcntl
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Literal, NamedTuple

Harm = Literal["lose", "repeat", "corrupt"]
_TUN = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x0001 | 0x1000
_FROM, _TO = slice(12, 16), slice(16, 20)  # of an IPv4 header
_MAX_PACKET_BYTES = 65_536
_NUMBERS = itertools.count()


def why_not() -> str:
    """Why this machine cannot run a Network; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not _TUN.exists() or shutil.which("ip") is None:
        return "no /dev/net/tun, or no `ip` on the PATH"
    return ""


class Host(NamedTuple):
    """Its address, and what to put before the commands that run on it."""

    address: str
    prefix: tuple[str, ...]


class Network:
    """Hosts by name, and this machine itself as `here`."""

    def __init__(self, *names: str) -> None:
        pid, number = os.getpid(), next(_NUMBERS)  # of its own: the kernel removes devices a little later
        self._name = f"bt{pid}x{number}n"
        self._subnet = f"10.{64 + pid % 64}.{(pid // 64 + number) % 256}"
        self.hosts: dict[str, Host] = {}
        tuns = [self._join(name) for name in ("here", *names)]
        command = [sys.executable, "-m", "tests.network", self._subnet, *map(str, tuns)]
        self._switch = subprocess.Popen(
            command, pass_fds=tuns, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for tun in tuns:
            os.close(tun)

    def cut(self, name: str, *others: str) -> None:
        """Drop all packets between a host and these others, or all others."""
        for other in others or self.hosts:
            self._ask(f"cut {self.hosts[name].address} {self.hosts[other].address}")

    def harm(self, how: Harm, share: float) -> None:
        """Drop this share of all packets, at random, deliver them twice, or flip a bit in their last byte."""
        self._ask(f"{how} {share}")

    def num_harmed(self) -> int:
        """Packets that were dropped, repeated or corrupted since the last `heal`."""
        return int(self._ask("count"))

    def heal(self) -> int:
        """Pass all packets on again; returns `num_harmed`."""
        return int(self._ask("heal"))

    def close(self) -> None:
        """Remove the hosts."""
        self._switch.communicate()
        for host in self.hosts.values():
            if host.prefix:
                _ip("netns", "delete", host.prefix[-1])

    def _join(self, name: str) -> int:
        number = len(self.hosts) + 1
        address, device = f"{self._subnet}.{number}", f"{self._name}{number}"
        tun = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN_NO_PI))
        there: tuple[str, ...] = ()
        prefix: tuple[str, ...] = ()
        if name != "here":
            there, prefix = ("-n", device), ("ip", "netns", "exec", device)
            _ip("netns", "add", device)
            _ip("link", "set", device, "netns", device)
            _ip(*there, "link", "set", "lo", "up")
        _ip(*there, "address", "add", f"{address}/24", "dev", device)
        _ip(*there, "link", "set", device, "up")
        self.hosts[name] = Host(address, prefix)
        return tun

    def _ask(self, command: str) -> str:
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(f"{command}\n")
        self._switch.stdin.flush()
        return self._switch.stdout.readline()


class _Switch:
    """Passes packets on until its standard input is closed."""

    def __init__(self, subnet: str, tuns: list[int]) -> None:
        self._devices = {_packed(f"{subnet}.{number}"): tun for number, tun in enumerate(tuns, 1)}
        self._chance = random.Random(1)
        self._cut: set[frozenset[bytes]] = set()
        self._shares: defaultdict[str, float] = defaultdict(float)
        self._num_harmed = 0

    def run(self) -> None:
        while True:
            for ready in select.select([0, *self._devices.values()], [], [])[0]:
                if ready:
                    with contextlib.suppress(OSError):  # its device is full: dropped, as any switch does
                        self._pass_on(os.read(ready, _MAX_PACKET_BYTES))
                elif not self._obey(os.read(0, 4096).decode().split()):
                    return

    def _obey(self, command: list[str]) -> bool:
        match command:
            case []:
                return False
            case ["cut", one, other]:
                self._cut.add(frozenset((_packed(one), _packed(other))))
            case ["lose" | "repeat" | "corrupt" as harm, share]:
                self._shares[harm] = float(share)
            case ["heal"]:
                self._cut.clear()
                self._shares.clear()
        sys.stdout.write(f"{self._num_harmed}\n")
        sys.stdout.flush()
        self._num_harmed = self._num_harmed if command != ["heal"] else 0
        return True

    def _pass_on(self, packet: bytes) -> None:
        ends = packet[_FROM], packet[_TO]
        if packet[0] >> 4 != 4 or ends[1] not in self._devices:
            return
        if self._happens(1.0 if frozenset(ends) in self._cut else self._shares["lose"]):
            return
        if self._happens(self._shares["corrupt"]):
            packet = packet[:-1] + bytes([packet[-1] ^ 1])
        os.write(self._devices[ends[1]], packet)
        if self._happens(self._shares["repeat"]):
            os.write(self._devices[ends[1]], packet)

    def _happens(self, share: float) -> bool:
        """Whether this packet is harmed; counts those that are."""
        harmed = self._chance.random() < share
        self._num_harmed += harmed
        return harmed


def _packed(address: str) -> bytes:
    return bytes(map(int, address.split(".")))


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


if __name__ == "__main__":
    _Switch(sys.argv[1], [int(tun) for tun in sys.argv[2:]]).run()
