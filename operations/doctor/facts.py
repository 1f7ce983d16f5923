"""The facts about a deployment: gathered once by the probes, judged by the table of findings."""

import msgspec

from baton.model_folder import download_command
from workers.flags import DisaggregationMode, EngineName

GIB = 1 << 30
_ABSURD = 1 << 50
_BIG_MODEL_BYTES = 4 * GIB  # larger weights are not a demo model's and need a GPU


class Gpu(msgspec.Struct, frozen=True):
    """One row of nvidia-smi. With unified memory (DGX Spark) the bytes are the machine's."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    is_unified: bool = False


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The model folder. `problem`: why it cannot be read; `missing`: files that it should have; `settings`:
    the names of the workers' YAML, which have the model's size if the folder's name has not."""

    path: str
    problem: str | None = None
    model_type: str = "gpt_oss"
    num_layers: int | None = None
    missing: tuple[str, ...] = ()
    weight_bytes: int = 0
    settings: str = ""

    @property
    def download(self) -> str:
        named = (self.path if "20b" in self.path.lower() else self.settings).lower()
        is_small = self.num_layers < 36 if self.num_layers else "120b" not in named
        repo = f"openai/gpt-oss-{'20b' if is_small else '120b'}"
        return download_command(repo) + ("" if self.path == repo else f" --local-dir {self.path}")


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker to be started. `gpus`: its list as written, None if not given; `given`: its engine settings by
    key path; `refusal`: the error at its start, if any."""

    mode: DisaggregationMode
    gpus: str | None = None
    given: dict[str, object] = {}
    draft_bytes: int = 0
    refusal: str | None = None

    @property
    def gpu_list(self) -> list[str]:
        return [] if self.gpus is None else self.gpus.split(",")

    def number(self, path: str) -> int:
        """A whole number among the settings; 0 if it is not given, or not plausible."""
        value = self.given.get(path)
        return int(value) if isinstance(value, int | float) and 0 < value < _ABSURD else 0

    @property
    def tensor_parallel_size(self) -> int:
        """As given; by default the number of listed GPUs."""
        return self.number("tensor_parallel_size") or len(self.gpu_list) or 1


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All facts. `gpu_problem`: why nvidia-smi lists no GPU; `port_problem`: why the HTTP port is not free.
    `servers`: why etcd or NATS do not serve. `memlock_bytes` None is unlimited."""

    gpus: tuple[Gpu, ...]
    gpu_problem: str | None = None
    model: Model
    workers: tuple[Worker, ...] = ()
    engine: EngineName = "trtllm"
    memlock_bytes: int | None = None
    shm_bytes: int = 0
    http_port: int = 8000
    port_problem: str | None = None
    servers: tuple[str, ...] = ()

    @property
    def wants_gpus(self) -> bool:
        """True if GPUs are listed, or the weights are too large for a demo model."""
        listed = any(worker.gpus is not None for worker in self.workers)
        return listed or self.model.weight_bytes > _BIG_MODEL_BYTES

    @property
    def gpu_indices(self) -> str:
        """The GPUs that exist, for messages."""
        return ",".join(str(gpu.index) for gpu in self.gpus)

    def gpus_of(self, worker: Worker) -> list[Gpu]:
        """The GPUs this worker would see: the listed ones that exist, in order; all without a list."""
        if worker.gpus is None:
            return list(self.gpus)
        return [gpu for entry in worker.gpu_list if (gpu := self.gpu(entry)) is not None]

    def used_gpus(self) -> list[Gpu]:
        """The GPUs that the workers will see, without duplicates; empty if no GPU is wanted."""
        used = {gpu.index: gpu for worker in self.workers for gpu in self.gpus_of(worker)}
        return list(used.values()) if self.wants_gpus else []

    def gpu(self, entry: str) -> Gpu | None:
        """The GPU of an index or UUID in CUDA_VISIBLE_DEVICES; a UUID prefix must be unambiguous."""
        is_uuid = entry.startswith("GPU-")
        found = [g for g in self.gpus if entry == str(g.index) or (is_uuid and g.uuid.startswith(entry))]
        return found[0] if len(found) == 1 else None
