"""Checks of inherited environment variables: proxies, UCX, NCCL, CUDA."""

from collections.abc import Iterator

from baton.peer_tls import CERT
from operations.doctor.facts import Facts
from operations.doctor.findings import Finding, error, warning

_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
_SLOW = {
    "NCCL_P2P_DISABLE": "all-reduce goes through host memory: several times slower",
    "NCCL_SHM_DISABLE": "ranks on one node communicate over the network: slower",
    "CUDA_LAUNCH_BLOCKING": "every kernel launch blocks: many times slower",
}


def environment(facts: Facts) -> Iterator[Finding]:
    """Inherited variables that break the processes or slow them down."""
    yield from _proxy(facts)
    yield from _plain_kv(facts)
    if not facts.wants_gpus:
        return
    yield from _ucx(facts)
    variables = facts.host.environment
    for name, breaks in _SLOW.items():
        if variables.get(name, "0") not in ("0", ""):
            yield warning(
                "env-slow", f"{name}={variables[name]}",
                breaks=breaks,
                repair=f"unset {name}",
            )  # fmt: skip
    interface = variables.get("NCCL_SOCKET_IFNAME", "")
    if interface and not interface.startswith("^") and not _any_device(facts, interface.lstrip("=")):
        yield error(
            "nccl-interface", f"NCCL_SOCKET_IFNAME={interface}: this machine has no such interface",
            breaks="NCCL finds no socket interface: tensor parallelism does not start",
            repair="ip -brief link; unset NCCL_SOCKET_IFNAME on one node",
        )  # fmt: skip


def _any_device(facts: Facts, wanted: str) -> bool:
    """NCCL matches interfaces by prefix."""
    prefixes = tuple(name for name in wanted.split(",") if name)
    return any(device.startswith(prefixes) for device in facts.host.network_devices)


def _proxy(facts: Facts) -> Iterator[Finding]:
    variables = facts.host.environment
    proxy = next((name for name in _PROXIES if variables.get(name)), None)
    spared = (variables.get("no_proxy") or variables.get("NO_PROXY") or "").replace(" ", "").split(",")
    if proxy and not {"*", "127.0.0.1", "127.0.0.0/8"} & set(spared):
        yield warning(
            "proxy", f"{proxy} is set, and no_proxy does not include 127.0.0.1",
            breaks="curl and other clients send requests for this machine's frontend to the proxy",
            repair="export no_proxy=localhost,127.0.0.1 NO_PROXY=localhost,127.0.0.1",
        )  # fmt: skip


def _plain_kv(facts: Facts) -> Iterator[Finding]:
    pairs = any(worker.mode in ("prefill", "decode") for worker in facts.workers)
    if facts.host.environment.get(CERT) and pairs and facts.engine in ("trtllm", "vllm"):
        yield warning(
            "kv-plain", f"{CERT} is set, and {facts.engine} moves KV itself, without TLS",
            breaks="who can read the network between prefill and decode can read the KV of prompts",
            repair="a network of their own for the workers",
        )  # fmt: skip


def _ucx(facts: Facts) -> Iterator[Finding]:
    variables = facts.host.environment
    transports = variables.get("UCX_TLS", "all")
    if _leaves_cuda_ipc_out(transports):
        yield warning(
            "ucx-tls", f"UCX_TLS={transports} excludes cuda_ipc",
            breaks="KV moves through host memory and TCP instead of NVLink: 10 to 100 times slower",
            repair="unset UCX_TLS, or add cuda_copy,cuda_ipc",
        )  # fmt: skip
    devices = variables.get("UCX_NET_DEVICES", "all")
    known = facts.host.network_devices
    missing = [d for d in devices.split(",") if d not in ("all", "") and d.partition(":")[0] not in known]
    if missing and known:
        yield error(
            "ucx-device", f"UCX_NET_DEVICES={devices}: this machine has no {missing[0]}",
            breaks="UCX finds no usable transport between nodes: handoffs fail",
            repair="ucx_info -d | grep Device; unset UCX_NET_DEVICES on one node",
        )  # fmt: skip


def _leaves_cuda_ipc_out(transports: str) -> bool:
    """`transports` lists the allowed ones or, after a `^`, the forbidden ones."""
    names = set(transports.removeprefix("^").split(","))
    is_named = bool(names & {"cuda", "cuda_ipc"})
    return is_named if transports.startswith("^") else not (is_named or "all" in names)
