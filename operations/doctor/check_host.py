"""Checks of the machine or container: limits, shared memory, namespaces, software and addresses."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from operations.doctor.facts import GIB, INITIAL_IPC_NAMESPACE, INITIAL_PID_NAMESPACE, Facts, Host
from operations.doctor.findings import Finding, error, note, warning

# The guide's docker run: --shm-size=10G --ulimit memlock=-1 --ulimit nofile=65536.
_SHM_BYTES = 10_000_000_000
_SHM_LEAST_BYTES = GIB
_NOFILE = 65536
_NOFILE_LEAST = 4096
_STACK_BYTES = 64 << 20
_LOOPBACK = ("127.", "localhost", "::1")


def limits(facts: Facts) -> Iterator[Finding]:
    """Locked memory, open files, stack and /dev/shm, where GPUs are wanted."""
    host = facts.host
    if not facts.wants_gpus:
        return
    if host.in_container and host.stack_bytes is not None and host.stack_bytes < _STACK_BYTES:
        yield note(
            "stack", f"the stack is limited to {host.stack_bytes >> 20} MiB; the guide sets 64",
            breaks="rarely anything; deep recursion during kernel compilation crashes the engine",
            repair=f"docker run --ulimit stack={_STACK_BYTES}",
        )  # fmt: skip
    if host.memlock_bytes is not None:
        yield warning(
            "memlock", f"locked memory is limited to {host.memlock_bytes // 1024} KiB",
            breaks="UCX cannot register memory with the network card: KV goes over TCP",
            repair="docker run --ulimit memlock=-1; outside: ulimit -l unlimited (limits.conf)",
        )  # fmt: skip
    if host.nofile is not None and host.nofile < _NOFILE_LEAST:
        yield warning(
            "nofile", f"only {host.nofile} open files are allowed",
            breaks="every GPU rank, UCX worker and client needs some: too many open files under load",
            repair=f"docker run --ulimit nofile={_NOFILE}:{_NOFILE}; outside: ulimit -n {_NOFILE}",
        )  # fmt: skip
    if any(worker.tensor_parallel_size > 1 for worker in facts.workers) and host.shm_bytes < _SHM_BYTES:
        tiny = host.shm_bytes < _SHM_LEAST_BYTES
        yield (error if tiny else warning)(
            "shm", f"shared memory (/dev/shm) is {host.shm_bytes / GIB:.2f} GiB",
            breaks="NCCL and MPI ranks communicate through it: bus errors at start" if tiny
            else "NCCL and MPI ranks communicate through it; the guide asks for 10 GB",
            repair="docker run --ipc host (or --shm-size=10G)",
        )  # fmt: skip


def namespaces(facts: Facts) -> Iterator[Finding]:
    """CUDA IPC between containers needs common PID and IPC namespaces and GPUs; UCX's cma needs ptrace."""
    host, modes = facts.host, {worker.mode for worker in facts.workers}
    half = len(modes & {"prefill", "decode"}) == 1
    if not facts.wants_gpus or not modes & {"prefill", "decode"}:
        return
    if half and host.in_container:
        if host.pid_namespace != INITIAL_PID_NAMESPACE:
            yield warning(
                "pid-namespace", "this container has its own PID namespace, and only prefill or decode",
                breaks="no CUDA IPC with a worker in another container: KV goes over TCP",
                repair="docker run --pid host (both), or both workers in one container",
            )  # fmt: skip
        if host.ipc_namespace != INITIAL_IPC_NAMESPACE:
            yield warning(
                "ipc-namespace", "this container has its own IPC namespace, and only prefill or decode",
                breaks="no CUDA IPC or shared memory with a worker in another container: KV goes over TCP",
                repair="docker run --ipc host (both), or both workers in one container",
            )  # fmt: skip
    seen = host.environment.get("NVIDIA_VISIBLE_DEVICES", "all")
    if half and host.in_container and seen not in ("all", "void", "none", ""):
        yield warning(
            "gpu-hidden", f"this container sees only GPU {seen}, and has only prefill or decode",
            breaks="no CUDA IPC with GPUs that are not visible here: KV goes over TCP",
            repair="docker run --gpus all; select GPUs with CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    if not host.can_ptrace and (host.ptrace_scope or 0) > 0:
        yield warning(
            "ptrace", f"kernel.yama.ptrace_scope is {host.ptrace_scope} and CAP_SYS_PTRACE is missing",
            breaks="UCX's cma transport is off: data between processes is copied twice",
            repair="docker run --cap-add SYS_PTRACE; outside: sysctl kernel.yama.ptrace_scope=0",
        )  # fmt: skip


def software(facts: Facts) -> Iterator[Finding]:
    """Are the frontend's packages and the engine installed, or can TensorRT-LLM's container start?"""
    host = facts.host
    if host.missing_packages:
        yield warning(
            "packages-missing", f"not installed: {', '.join(host.missing_packages)}",
            breaks="python -m frontend exits at start (workers need none of them)",
            repair="pip install '.[frontend]'",
        )  # fmt: skip
    if facts.engine == "vllm" and not host.has_vllm:
        yield error(
            "vllm-missing", "vllm is not installed",
            breaks="--engine vllm exits at start",
            repair="pip install '.[frontend,vllm]'",
        )  # fmt: skip
    if facts.wants_tensorrt_llm and not host.has_tensorrt_llm:
        yield from _without_tensorrt_llm(host)


def _without_tensorrt_llm(host: Host) -> Iterator[Finding]:
    if host.in_container:
        yield warning(
            "trtllm-missing", "tensorrt_llm is not installed in this container",
            breaks="--engine trtllm exits at start",
            repair="use the worker image: docker build -f deploy/Dockerfile --target worker .",
        )  # fmt: skip
    elif not host.has_docker:
        yield warning(
            "trtllm-missing", "tensorrt_llm is not installed, and neither is docker to run its image",
            breaks="--engine trtllm exits at start",
            repair="install Docker and the NVIDIA Container Toolkit: see deploy/README.md",
        )  # fmt: skip
    elif host.container_toolkit is None:
        yield error(
            "toolkit-missing", "docker is installed, but the NVIDIA Container Toolkit is not",
            breaks="docker run --gpus all: could not select device driver",
            repair="apt-get install nvidia-container-toolkit && nvidia-ctk runtime configure; restart docker",
        )  # fmt: skip
    elif not host.docker_answers:
        yield warning(
            "docker-down", "docker is installed, but its daemon does not answer",
            breaks="docker run and docker compose: cannot connect to the Docker daemon",
            repair="systemctl start docker; usermod --append --groups docker $USER, then log in again",
        )  # fmt: skip


def network(facts: Facts) -> Iterator[Finding]:
    """Is the HTTP port free, can peers reach --host, and is the file registry's folder safe?"""
    if not 0 < facts.http_port < 65536:
        yield error(
            "port-bad", f"--http-port {facts.http_port} is not a valid port",
            breaks="the frontend exits at start",
            repair="--http-port 8000",
        )  # fmt: skip
    elif facts.http_port_problem:
        yield error(
            "port-taken", f"port {facts.http_port}: {facts.http_port_problem}",
            breaks="the frontend exits at start, or another program answers in its place",
            repair=f"ss -ltnp 'sport = :{facts.http_port}'; stop it, or --http-port {facts.http_port + 1}",
        )  # fmt: skip
    if facts.host_problem:
        yield error(
            "host-bad", f"--host {facts.bind_host}: {facts.host_problem}",
            breaks="workers cannot listen there",
            repair="ip -brief address; give an address of this machine",
        )  # fmt: skip
    if facts.registry_problem:
        yield error(
            "registry-unsafe", facts.registry_problem,
            breaks="frontend and workers exit at start",
            repair="--file-registry (or BATON_FILE_REGISTRY) with a folder that you own",
        )  # fmt: skip
    remote = [s.url for s in facts.services if not _is_loopback(s.url)]
    if remote and facts.bind_host.startswith(_LOOPBACK):
        yield warning(
            "host-loopback", f"--host {facts.bind_host}, but {remote[0]} is on another machine",
            breaks="workers advertise an address that other nodes cannot reach",
            repair="--host (or BATON_HOST) with this machine's address: ip -brief address",
        )  # fmt: skip


def _is_loopback(url: str) -> bool:
    return (urlsplit(url).hostname or "").startswith(_LOOPBACK)
