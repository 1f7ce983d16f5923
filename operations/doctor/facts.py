"""All that doctor knows about a deployment: gathered once by the probes, judged by pure checks."""

from typing import Literal

import msgspec

from workers.flags import DisaggregationMode, EngineName

GIB = 1 << 30
_ABSURD = 1e15
BIG_MODEL_BYTES = 4 * GIB
"""Weights above this need a GPU: it is not the demo model."""

INITIAL_IPC_NAMESPACE = 0xEFFFFFFF
INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Linux gives the first namespaces fixed numbers (include/linux/proc_ns.h): others are containers'."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One row of nvidia-smi. Bytes are None where the driver does not tell (unified memory: DGX Spark)."""

    index: int
    uuid: str
    name: str
    total_bytes: int | None
    free_bytes: int | None
    driver: str
    compute: tuple[int, int]
    mig: bool = False
    health: "GpuHealth | None" = None


class GpuHealth(msgspec.Struct, frozen=True, kw_only=True):
    """More of nvidia-smi's report; numbers are None and words `N/A` where a GPU does not have it."""

    persistence_mode: str
    compute_mode: str
    num_ecc_errors: int | None
    remap_pending: str
    remap_failure: str
    fabric_state: str


class Nvidia(msgspec.Struct, frozen=True, kw_only=True):
    """What nvidia-smi said. `links` and `peers` go by (index, index): `NV18`, `PIX`, `SYS`; `OK`, `NS`."""

    gpus: tuple[Gpu, ...] = ()
    problem: str | None = None
    links: dict[tuple[int, int], str] = {}
    peers: dict[tuple[int, int], str] = {}


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A safetensors file. `size_bytes` None: missing. `whole_bytes`: what its header promises, if any."""

    name: str
    size_bytes: int | None
    whole_bytes: int | None


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of config.json that memory and parallelism depend on."""

    model_type: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    max_positions: int
    dtype_bytes: int = 2

    def kv_bytes_per_token(self, dtype: str = "auto") -> float:
        """Key and value of one token over all layers: 73,728 for gpt-oss-120b in bfloat16."""
        per_value = {"auto": self.dtype_bytes, "fp8": 1.0, "nvfp4": 0.5, "float32": 4.0}.get(dtype, 2.0)
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * per_value


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The model folder. `num_unfinished` counts downloads that were broken off, `total_bytes` is what the
    index promises, `snapshot` the model's folder inside if `path` is one of the Hugging Face cache.
    """

    path: str
    is_folder: bool
    folder_problem: str | None = None
    is_writable: bool = True
    snapshot: str | None = None
    files: frozenset[str] = frozenset()
    shape: Shape | None = None
    config_problem: str | None = None
    index_problem: str | None = None
    tokenizer_problem: str | None = None
    shards: tuple[Shard, ...] = ()
    total_bytes: int = 0
    num_unfinished: int = 0
    disk_free_bytes: int = 0

    @property
    def weight_bytes(self) -> int:
        """Of the shards that are there."""
        return sum(shard.size_bytes or 0 for shard in self.shards)


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker that is to be started. `gpus` is the list as it was written, None if none was.

    `argv` is what it is started with, `given` are the engine settings that it would have of it: by key path,
    (value, source); `overruled` what its YAML says otherwise than a typed flag. `refusal` is what it says
    instead of starting.
    """

    mode: DisaggregationMode
    gpus: str | None = None
    argv: tuple[str, ...] = ()
    given: dict[str, tuple[object, str]] = {}
    overruled: dict[str, tuple[object, str]] = {}
    refusal: str | None = None

    @property
    def gpu_list(self) -> list[str]:
        """The entries of `gpus`."""
        return [] if self.gpus is None else self.gpus.split(",")

    def value(self, path: str) -> object:
        """A setting; None if it is not given."""
        return self.given.get(path, (None, ""))[0]

    def place(self, path: str) -> str:
        """Where a setting was given, for the operator."""
        return (
            f"{self.mode}: {path} ({self.given[path][1]})" if path in self.given else f"{self.mode}: {path}"
        )

    def text(self, path: str, default: str) -> str:
        """A setting as text."""
        value = self.value(path)
        return default if value is None else str(value)

    def number(self, path: str) -> float | None:
        """A setting; None if it is not given, or no number that a setting can have."""
        value = self.value(path)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        return value if abs(value) < _ABSURD else None

    def is_on(self, path: str) -> bool:
        """True if the setting is true."""
        return self.value(path) is True

    @property
    def tensor_parallel_size(self) -> int:
        """As given; else each listed GPU is meant."""
        return max(1, int(self.number("tensor_parallel_size") or len(self.gpu_list)))

    @property
    def pipeline_parallel_size(self) -> int:
        """As given."""
        return max(1, int(self.number("pipeline_parallel_size") or 1))


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """etcd or NATS at one address. Positive `clock_ahead_s`: this machine's clock is ahead of that one's.

    `problem`: it does not answer. `refusal`: it does, and does not let this user in.
    """

    name: Literal["etcd", "NATS"]
    url: str
    problem: str | None = None
    refusal: str | None = None
    version: tuple[int, ...] = ()
    latency_s: float = 0.0
    clock_ahead_s: float | None = None
    max_payload_bytes: int | None = None


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """This machine, or this container. A limit of None is unlimited; `ptrace_scope` is None without Yama."""

    memory_bytes: int
    memory_free_bytes: int
    memlock_bytes: int | None = None
    nofile: int | None = None
    stack_bytes: int | None = None
    shm_bytes: int = 0
    in_container: bool = False
    ipc_namespace: int = INITIAL_IPC_NAMESPACE
    pid_namespace: int = INITIAL_PID_NAMESPACE
    ptrace_scope: int | None = None
    can_ptrace: bool = False
    has_tensorrt_llm: bool = False
    has_vllm: bool = False
    has_docker: bool = False
    docker_answers: bool = True
    container_toolkit: str | None = None
    hf_token: bool = False
    year: int = 2026
    environment: dict[str, str] = {}
    network_devices: frozenset[str] = frozenset()
    missing_packages: tuple[str, ...] = ()


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All of it. Ports: None if free, else why not. `host_problem`: why --host cannot be bound;
    `registry_problem`: why the file registry, if it is the one, cannot be trusted."""

    host: Host
    nvidia: Nvidia
    model: Model
    workers: tuple[Worker, ...] = ()
    services: tuple[Service, ...] = ()
    bind_host: str = "127.0.0.1"
    host_problem: str | None = None
    registry_problem: str | None = None
    http_port: int = 8000
    http_port_problem: str | None = None
    engine: EngineName = "trtllm"

    @property
    def wants_gpus(self) -> bool:
        """True if a GPU was named, or the model is too large for the demo model."""
        listed = any(worker.gpus is not None for worker in self.workers)
        return listed or self.model.weight_bytes > BIG_MODEL_BYTES

    @property
    def wants_tensorrt_llm(self) -> bool:
        """True for its workers, unless the model is a demo, which the embedded engine runs on a GPU, too."""
        return (
            self.engine == "trtllm" and self.wants_gpus and not 0 < self.model.weight_bytes <= BIG_MODEL_BYTES
        )

    def worker(self, mode: DisaggregationMode) -> Worker | None:
        """The first worker of that mode."""
        return next((worker for worker in self.workers if worker.mode == mode), None)

    def gpus_of(self, worker: Worker) -> list[Gpu]:
        """The GPUs this worker would see: the listed ones that exist, in order; all if none is listed."""
        if worker.gpus is None:
            return list(self.nvidia.gpus)
        found = (self.gpu(entry) for entry in worker.gpu_list)
        return [gpu for gpu in found if gpu is not None]

    def gpu(self, entry: str) -> Gpu | None:
        """By index or UUID, as CUDA_VISIBLE_DEVICES names it: cut short, a UUID must still be one GPU's."""
        found = [
            gpu
            for gpu in self.nvidia.gpus
            if entry == str(gpu.index) or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))
        ]
        return found[0] if len(found) == 1 else None

    def free_bytes(self, gpu: Gpu) -> int:
        """Free memory; with unified memory it is the machine's."""
        return self.host.memory_free_bytes if gpu.free_bytes is None else gpu.free_bytes

    def total_bytes(self, gpu: Gpu) -> int:
        """All memory; with unified memory it is the machine's."""
        return self.host.memory_bytes if gpu.total_bytes is None else gpu.total_bytes
