"""GPU memory between processes: exported once per allocation, mapped, and unmapped whatever fails."""

import ctypes
import fcntl
import os
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest

from workers.engines.vllm.patches import peer_memory
from workers.engines.vllm.patches.peer_memory import Exported, PeerMemory, PeerMemoryError, export, place

LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)
BASES = (0x1000, 0x2000)


def pointed(argument: Any) -> Any:
    """What `byref` points at."""
    return argument._obj  # noqa: SLF001  ctypes has no other name


class Driver:
    """CUDA's driver, with two allocations. `num_left`: handles that it can open before it fails."""

    def __init__(self, num_left: int = 9) -> None:
        self.num_left = num_left
        self.mapped: list[int] = []

    def __call__(self, function: str, *arguments: Any) -> None:
        if function == "cuMemGetAddressRange_v2":
            base, _, address = arguments
            pointed(base).value = max(known for known in BASES if known <= address.value)
        elif function == "cuIpcGetMemHandle":
            handle, base = arguments
            ctypes.memset(ctypes.addressof(pointed(handle)), base.value >> 12, 64)
        elif function == "cuIpcOpenMemHandle_v2":
            address, handle, _ = arguments
            if not self.num_left:
                raise PeerMemoryError("out of address space")
            self.num_left -= 1
            pointed(address).value = bytes(handle)[0] << 20
            self.mapped.append(pointed(address).value)
        else:
            assert function == "cuIpcCloseMemHandle"
            self.mapped.remove(arguments[0].value)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(peer_memory, "_cuda", made)
    return made


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


HANDLES = [b"\x01" * 64, b"\x02" * 64]


def exported(**changes: Any) -> Exported:
    fields: dict[str, Any] = {"allocations": HANDLES, "regions": [(0, 0x10), (1, 0), (0, 0x20)]}
    return Exported(**(fields | {"place": place(), "pid": os.getpid()} | changes))


def test_each_allocation_is_exported_once(driver: Driver) -> None:
    assert export([0x1010, 0x2000, 0x1020]) == exported()


def test_regions_are_mapped_in_order_until_the_end(driver: Driver) -> None:
    before = open_files()
    memory = PeerMemory(exported())
    assert memory.addresses == [(1 << 20) + 0x10, 2 << 20, (1 << 20) + 0x20]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(1200, LIMITS[0]), LIMITS[1]))
    high = fcntl.fcntl(memory._owner, fcntl.F_DUPFD, 1100)  # noqa: SLF001  of a process with many files
    memory._owner, low = high, memory._owner  # noqa: SLF001  as above
    os.close(low)
    assert memory.is_alive()
    for _ in range(2):
        memory.close()
        assert driver.mapped == []
        assert open_files() == before


@pytest.mark.parametrize(
    ("changes", "num_left"),
    [({}, 1), ({"regions": [(2, 0)]}, 9), ({"allocations": [HANDLES[0], b"short"]}, 9)],
    ids=["the driver", "a region", "a handle"],
)
def test_what_cannot_be_mapped_leaves_nothing_mapped(
    changes: dict[str, Any], num_left: int, driver: Driver
) -> None:
    driver.num_left, before = num_left, open_files()
    with pytest.raises(PeerMemoryError):
        PeerMemory(exported(**changes))
    assert driver.mapped == []
    assert open_files() == before


def test_memory_of_an_owner_that_has_ended_or_is_elsewhere_is_not_mapped(driver: Driver) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    for changes in ({"pid": ended.pid}, {"place": "elsewhere"}):
        with pytest.raises(PeerMemoryError):
            PeerMemory(exported(**changes))
    assert driver.num_left == 9


def test_a_place_is_a_boot_of_a_host_and_a_namespace_of_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_memory, "_BOOT_ID", tmp_path / "boot")
    monkeypatch.setattr(peer_memory, "_PID_NAMESPACE", tmp_path / "pid")
    places = set()
    for boot, namespace in (("1", "pid:[1]"), ("1", "pid:[2]"), ("2", "pid:[1]")):
        (tmp_path / "boot").write_text(boot + "\n")
        (tmp_path / "pid").unlink(missing_ok=True)
        (tmp_path / "pid").symlink_to(namespace)
        places.add(place())
    assert len(places) == 3
