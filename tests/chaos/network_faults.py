"""Faults of the network between the hosts of the frontend, the workers and the brokers."""

import json
import subprocess
from functools import partial
from pathlib import Path

from tests.chaos.injector import require
from tests.chaos.scene import Scene
from tests.chaos.schedule import Targets
from tests.network import Harm, Network
from tests.waiting import wait_for


def _network(scene: Scene) -> Network:
    assert scene.network is not None
    return scene.network


def _harmed(network: Network) -> int:
    """The number of packets harmed so far, once there is one."""
    wait_for(network.num_harmed)
    return network.num_harmed()


class Cut:
    """Hosts that receive nothing, and whose packets arrive nowhere."""

    def __init__(self, scene: Scene, targets: Targets) -> None:
        self._network = _network(scene)
        self._targets = targets
        self._before: dict[str, int] = {}

    def begin(self) -> None:
        for name in self._targets:
            self._network.cut(name)
        self._before = {name: self._received_bytes(name) for name in self._targets}

    def proof(self) -> str:
        """From the kernel's counters of the host's only device."""
        num_dropped = _harmed(self._network)
        for name, before in self._before.items():
            num_bytes = self._received_bytes(name) - before
            require(num_bytes == 0, f"{name} received {num_bytes} bytes")
        return f"0 bytes received, {num_dropped} packets dropped"

    def end(self) -> None:
        self._network.heal()

    def _received_bytes(self, name: str) -> int:
        namespace = self._network.hosts[name].prefix[-1]
        command = ["ip", "-n", namespace, "-s", "-j", "link", "show", namespace]
        (device,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        received_bytes: int = device["stats64"]["rx"]["bytes"]
        return received_bytes


class CutPair(Cut):
    """No packet between the first target and the others, which reach everyone else."""

    def begin(self) -> None:
        self._network.cut(*self._targets)

    def proof(self) -> str:
        return f"{_harmed(self._network)} packets dropped"


class HarmPackets:
    """Some of all packets are lost, repeated or corrupted, which counters of the kernel show: `counters` is
    a group of /proc/net/snmp or netstat, and a name in it."""

    def __init__(
        self, scene: Scene, _: Targets, *, how: Harm, share: float, counters: tuple[str, str]
    ) -> None:
        self._network = _network(scene)
        self._harm = how, share
        self._counters = counters
        self._before = 0

    def begin(self) -> None:
        self._before = self._counted()
        self._network.harm(*self._harm)

    def proof(self) -> str:
        """For the frontend's host."""
        name = self._counters[1]
        num_harmed, noticed = _harmed(self._network), self._counted() - self._before
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


lose = partial(HarmPackets, how="lose", share=0.2, counters=("Tcp", "RetransSegs"))
repeat = partial(HarmPackets, how="repeat", share=0.2, counters=("TcpExt", "TCPDSACKOldSent"))
corrupt = partial(HarmPackets, how="corrupt", share=0.05, counters=("Tcp", "InCsumErrors"))
