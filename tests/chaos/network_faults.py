"""Faults of the network between the frontend's and brokers' host and those of the workers."""

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.chaos.injector import require
from tests.chaos.scene import Scene
from tests.chaos.schedule import Targets
from tests.network import Network


def _network(scene: Scene) -> Network:
    assert scene.network is not None
    return scene.network


class Cut:
    """A host gets and sends nothing."""

    def __init__(self, scene: Scene, targets: Targets) -> None:
        self._network = _network(scene)
        self._targets = targets
        self._before: dict[str, tuple[int, int]] = {}

    def begin(self) -> None:
        for name in self._targets:
            self._network.cut(name)
        self._before = {name: self._passed(name) for name in self._targets}

    def proof(self) -> str:
        """From the kernel's counters of the host's only device."""
        num_sent = 0
        for name, (received, sent) in self._before.items():
            received_now, sent_now = self._passed(name)
            require(received_now == received, f"{name} received {received_now - received} bytes")
            num_sent += sent_now - sent
        num_dropped = self._network.num_harmed()
        require(num_sent > 0 and num_dropped > 0, "no packet was sent")
        return f"0 bytes received, {num_dropped} packets dropped"

    def end(self) -> None:
        self._network.heal()

    def _passed(self, name: str) -> tuple[int, int]:
        """Bytes received and sent."""
        namespace = self._network.hosts[name].prefix[-1]
        command = ["ip", "-n", namespace, "-s", "-j", "link", "show", namespace]
        (device,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        counted = device["stats64"]
        return counted["rx"]["bytes"], counted["tx"]["bytes"]


class CutPair:
    """No packet between the first target and the others, which reach everyone else."""

    def __init__(self, scene: Scene, targets: Targets) -> None:
        self._network = _network(scene)
        self._targets = targets

    def begin(self) -> None:
        self._network.cut(*self._targets)

    def proof(self) -> str:
        num_dropped = self._network.num_harmed()
        require(num_dropped > 0, "no packet was sent between them")
        return f"{num_dropped} packets dropped"

    def end(self) -> None:
        self._network.heal()


class HarmPackets:
    """Some of all packets are lost, repeated or corrupted, which counters of the kernel show: `counters` is
    a group of /proc/net/snmp or netstat, and a name in it.
    """

    def __init__(
        self, scene: Scene, _: Targets, *, harm: Callable[[Network], None], counters: tuple[str, str]
    ) -> None:
        self._network = _network(scene)
        self._harm = harm
        self._counters = counters
        self._before = 0

    def begin(self) -> None:
        self._before = self._counted()
        self._harm(self._network)

    def proof(self) -> str:
        """For the frontend's host."""
        name = self._counters[1]
        num_harmed, noticed = self._network.num_harmed(), self._counted() - self._before
        require(num_harmed > 0, "no packet was harmed")
        require(noticed > 0, f"the kernel counted no {name}")
        return f"{num_harmed} packets harmed, {name} {noticed}"

    def end(self) -> None:
        self._network.heal()

    def _counted(self) -> int:
        group, name = self._counters
        names, values = (
            line.split()
            for path in ("/proc/net/snmp", "/proc/net/netstat")
            for line in Path(path).read_text().splitlines()
            if line.startswith(f"{group}:")
        )
        return int(values[names.index(name)])


lose = partial(HarmPackets, harm=lambda network: network.lose(0.2), counters=("Tcp", "RetransSegs"))
repeat = partial(
    HarmPackets, harm=lambda network: network.repeat(0.2), counters=("TcpExt", "TCPDSACKOldSent")
)
corrupt = partial(HarmPackets, harm=lambda network: network.corrupt(0.05), counters=("Tcp", "InCsumErrors"))
