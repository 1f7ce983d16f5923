"""The facts about a deployment: gathered once by the probes, judged by the table of findings."""

import re
from typing import Annotated

import msgspec

from baton.connect import Service
from baton.model_folder import download_command
from workers.flags import DisaggregationMode, EngineName

GIB = 1 << 30
INDEX = "model.safetensors.index.json"
_ABSURD = 1e15
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
BIG_MODEL_BYTES = 4 * GIB
"""Larger weights are not a demo model's and need a GPU."""


class Gpu(msgspec.Struct, frozen=True):
    """One row of nvidia-smi. Bytes are None if not reported (unified memory: DGX Spark)."""

    index: int
    uuid: str
    name: str
    total_bytes: int | None
    free_bytes: int | None
    driver: str
    compute: tuple[int, int]


class Nvidia(msgspec.Struct, frozen=True, kw_only=True):
    """nvidia-smi's report."""

    gpus: tuple[Gpu, ...] = ()
    problem: str | None = None

    @property
    def why_none(self) -> str | None:
        """Why there is no GPU, if there is none."""
        return None if self.gpus else self.problem or "nvidia-smi lists none"


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A safetensors file: `size_bytes` is None if missing, `whole_bytes` the size that its header implies."""

    name: str
    size_bytes: int | None
    whole_bytes: int | None


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that checks depend on."""

    model_type: str
    num_hidden_layers: _Count
    max_position_embeddings: _Count


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The model folder; `bad_files` has what is wrong with each of its JSON files."""

    path: str
    is_folder: bool
    folder_problem: str | None = None
    files: frozenset[str] = frozenset()
    shape: Shape | None = None
    bad_files: dict[str, str] = {}
    shards: tuple[Shard, ...] = ()

    @property
    def weight_bytes(self) -> int:
        return sum(shard.size_bytes or 0 for shard in self.shards)

    @property
    def download(self) -> str:
        shape = self.shape
        is_small = shape.num_hidden_layers < 36 if shape else re.search(r"(?<!\d)20b", self.path.lower())
        repo = f"openai/gpt-oss-{'20b' if is_small else '120b'}"
        return download_command(repo) + ("" if self.path == repo else f" --local-dir {self.path}")


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker to be started. `gpus` is its list as written, None if not given.

    `given` has its engine settings by key path, `draft` their draft model.
    `refusal` is the error at its start, if any.
    """

    mode: DisaggregationMode
    gpus: str | None = None
    given: dict[str, object] = {}
    draft: Model | None = None
    refusal: str | None = None

    @property
    def gpu_list(self) -> list[str]:
        return [] if self.gpus is None else self.gpus.split(",")

    def text(self, path: str, default: str) -> str:
        value = self.given.get(path)
        return default if value is None else str(value)

    def number(self, path: str) -> float | None:
        """A setting; None if not given, or not a plausible number."""
        value = self.given.get(path)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value if abs(value) < _ABSURD else None

    @property
    def tensor_parallel_size(self) -> int:
        """As given; by default the number of listed GPUs."""
        return max(1, int(self.number("tensor_parallel_size") or len(self.gpu_list)))

    @property
    def draft_bytes(self) -> int:
        return self.draft.weight_bytes if self.draft is not None else 0

    @property
    def num_ranks(self) -> int:
        """Tensor times pipeline parallelism: the GPUs that it needs."""
        return self.tensor_parallel_size * max(1, int(self.number("pipeline_parallel_size") or 1))


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """This machine or container. `memlock_bytes` None is unlimited."""

    memory_bytes: int
    memory_free_bytes: int
    memlock_bytes: int | None = None
    shm_bytes: int = 0
    environment: dict[str, str] = {}


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts. `http_port_problem`: why the port is not free; `start_problem`: why no process would start:
    an address, the file registry, a login or a certificate.
    """

    host: Host
    nvidia: Nvidia
    model: Model
    workers: tuple[Worker, ...] = ()
    services: tuple[Service, ...] = ()
    bind_host: str = "127.0.0.1"
    start_problem: str | None = None
    http_port: int = 8000
    http_port_problem: str | None = None
    engine: EngineName = "trtllm"

    @property
    def wants_gpus(self) -> bool:
        """True if GPUs are listed, or the weights are too large for a demo model."""
        listed = any(worker.gpus is not None for worker in self.workers)
        return listed or self.model.weight_bytes > BIG_MODEL_BYTES

    @property
    def context(self) -> int:
        return self.model.shape.max_position_embeddings if self.model.shape else 131_072

    @property
    def gpu_indices(self) -> str:
        """The GPUs that exist, for messages."""
        return ",".join(str(gpu.index) for gpu in self.nvidia.gpus)

    def worker(self, mode: DisaggregationMode) -> Worker | None:
        """The first worker in that mode."""
        return next((worker for worker in self.workers if worker.mode == mode), None)

    def gpus_of(self, worker: Worker) -> list[Gpu]:
        """The GPUs this worker would see: the listed ones that exist, in order; all without a list."""
        if worker.gpus is None:
            return list(self.nvidia.gpus)
        return [gpu for entry in worker.gpu_list if (gpu := self.gpu(entry)) is not None]

    def used_gpus(self) -> list[Gpu]:
        """The GPUs that the workers will see, without duplicates; empty if no GPU is wanted."""
        used = {gpu.index: gpu for worker in self.workers for gpu in self.gpus_of(worker)}
        return list(used.values()) if self.wants_gpus else []

    def gpu(self, entry: str) -> Gpu | None:
        """The GPU of an index or UUID in CUDA_VISIBLE_DEVICES; a UUID prefix must be unambiguous."""
        gpus, is_uuid = self.nvidia.gpus, entry.startswith("GPU-")
        found = [g for g in gpus if entry == str(g.index) or (is_uuid and g.uuid.startswith(entry))]
        return found[0] if len(found) == 1 else None

    def free_bytes(self, gpu: Gpu) -> int:
        """Free memory: the machine's if memory is unified."""
        return self.host.memory_free_bytes if gpu.free_bytes is None else gpu.free_bytes

    def total_bytes(self, gpu: Gpu) -> int:
        """Total memory: the machine's if memory is unified."""
        return self.host.memory_bytes if gpu.total_bytes is None else gpu.total_bytes
