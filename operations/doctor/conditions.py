"""What the rows of the table of findings are about, and when they hold: pure functions over the facts.

A function returns what its row's texts show as `found`; nothing, if there is no finding.
"""

import re
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

from baton.connect import Service
from operations.doctor.facts import GIB, Facts, Gpu, Host, Model, Worker
from operations.doctor.memory import Halves, halves, kv_bytes_given
from workers.engines.trtllm.settings import BACKEND, BUFFER, GUESSING, MANAGER_V2, RUNTIME, manager
from workers.engines.vllm.settings import GUESSING as VLLM_GUESSING

# The settings that prefill and decode must agree on, by code, with their defaults.
SHARED_SETTINGS = {
    "pair-dtype": ("kv_cache_config.dtype", "auto"),
    "pair-block": ("kv_cache_config.tokens_per_block", "32"),
    "pair-backend": (BACKEND, ""),
    "pair-runtime": (RUNTIME, "auto"),
    "pair-manager": (MANAGER_V2, "auto"),
    "pair-head": (f"{GUESSING.names[0]}.{GUESSING.model}", "none"),
    "pair-draft": (f"{VLLM_GUESSING.names[0]}.{VLLM_GUESSING.model}", "none"),
}
_ENTRY = re.compile(r"\d+|GPU-[0-9a-fA-F-]+|MIG-[0-9a-fA-F/-]+")
_LOOPBACK = ("127.", "localhost", "::1")
_INDEX = "model.safetensors.index.json"


def both(facts: Facts) -> Iterable[tuple[Worker, Worker]]:
    prefill, decode = facts.worker("prefill"), facts.worker("decode")
    return [(prefill, decode)] if prefill and decode else ()


def transceivers(facts: Facts) -> Iterable[Worker]:
    found = (facts.worker("prefill"), facts.worker("decode"))
    return [worker for worker in found if worker and worker.given and facts.wants_tensorrt_llm]


def old_drivers(facts: Facts) -> Iterator[tuple[str, int]]:
    """Each driver that is too old, and the oldest that is not."""
    # CUDA 12.8 needs driver 570; its guide asks for 575 on Blackwell.
    needed = 575 if any(gpu.compute >= (10, 0) for gpu in facts.nvidia.gpus) else 570
    for driver in sorted({gpu.driver for gpu in facts.used_gpus()}):
        major = driver.partition(".")[0]
        if not major.isdecimal() or int(major) < needed:
            yield driver, needed


def folders(facts: Facts) -> Iterable[Model]:
    return (facts.model,) if facts.model.is_folder and not is_cache(facts.model) else ()


def missing_files(facts: Facts) -> Iterator[tuple[str, str]]:
    for found in folders(facts):
        if "config.json" not in found.files:
            yield "config.json", "no engine can build the model"
        if "tokenizer.json" not in found.files:
            yield "tokenizer.json", "the frontend cannot turn text into tokens"
        if not found.shards and _INDEX not in found.bad_files:
            yield "*.safetensors", "no weights to load"
        if len(found.shards) > 1 and _INDEX not in found.files:
            yield _INDEX, "the engine cannot tell which file holds which weight"
        if missing := [shard.name for shard in found.shards if shard.size_bytes is None]:
            yield _some(missing), "the engine exits after minutes of loading"


def bad_files(facts: Facts) -> Iterator[tuple[str, str]]:
    for found in folders(facts):
        yield from found.bad_files.items()


def no_gpu(facts: Facts) -> str | None:
    return None if facts.nvidia.gpus else facts.nvidia.problem or "nvidia-smi lists none"


def taken_gib(gpu: Gpu) -> float | None:
    if gpu.free_bytes is None or gpu.total_bytes is None:
        return None
    taken = (gpu.total_bytes - gpu.free_bytes) / GIB
    return taken if taken > 2 else None


def bad_list(facts: Facts, worker: Worker) -> str | None:
    """The list of GPUs, if CUDA cannot parse it or finds a GPU twice in it."""
    found = [(entry, facts.gpu(entry)) for entry in worker.gpu_list]
    is_unique = len({entry if gpu is None else gpu.index for entry, gpu in found}) == len(found)
    return None if is_unique and all(_ENTRY.fullmatch(entry) for entry, _ in found) else repr(worker.gpus)


def absent(facts: Facts, worker: Worker) -> str | None:
    if not facts.nvidia.gpus or bad_list(facts, worker):
        return None
    wanted = [entry for entry in worker.gpu_list if not entry.startswith("MIG-")]
    return ", ".join(entry for entry in wanted if facts.gpu(entry) is None)


def shared_gpus(facts: Facts, worker: Worker) -> str | None:
    """The GPUs that a later worker uses as well, unless both have a KV cache of a given size."""
    if not facts.wants_gpus:
        return None
    later = facts.workers[facts.workers.index(worker) + 1 :]
    later = tuple(w for w in later if not (kv_bytes_given(worker) and kv_bytes_given(w)))
    used = {gpu.index for other in later for gpu in facts.gpus_of(other)}
    return ", ".join(str(gpu.index) for gpu in facts.gpus_of(worker) if gpu.index in used)


def small_gpus(facts: Facts) -> Iterator[Halves]:
    """GPUs of a prefill and a decode worker of vLLM that cannot hold both."""
    for prefill, decode in both(facts) if facts.engine == "vllm" and facts.wants_gpus else ():
        for gpu in facts.gpus_of(prefill):
            divided = halves(facts, gpu) if gpu in facts.gpus_of(decode) else None
            if divided is not None and divided.kv_bytes <= 0:
                yield divided


def is_cache(model: Model) -> bool:
    return bool(model.is_folder and model.snapshot and "config.json" not in model.files)


def broken_shards(model: Model) -> str:
    found = [s.name for s in model.shards if s.size_bytes is not None and s.size_bytes != s.whole_bytes]
    return _some(found)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def shorter_decode(pair: tuple[Worker, Worker]) -> tuple[int, int] | None:
    """The longest requests of prefill and decode, if decode's is shorter."""
    return _if_less(*(worker.number("max_seq_len") for worker in pair))


def beyond_graphs(_: Facts, worker: Worker) -> tuple[int, int] | None:
    """The batch and the CUDA graphs' size, if that is smaller."""
    return _if_less(worker.number("max_batch_size"), worker.number("cuda_graph_config.max_batch_size"))


def _if_less(first: float | None, second: float | None) -> tuple[int, int] | None:
    return None if first is None or second is None or first <= second else (int(first), int(second))


def short_buffer(facts: Facts, worker: Worker) -> tuple[int, int] | None:
    """The transfer buffer and the longest prompt, if that does not fit."""
    room, longest = worker.number(BUFFER), int(worker.number("max_seq_len") or facts.context)
    return (int(room), longest) if room is not None and room < longest else None


def differ(pair: tuple[Worker, Worker], code: str) -> tuple[str, str] | None:
    """The values of prefill and decode of a setting that they must share, if they differ."""
    key, default = SHARED_SETTINGS[code]
    prefill, decode = (_word(worker, key, default) for worker in pair)
    is_known = prefill and decode and all(worker.given for worker in pair)
    return (prefill, decode) if is_known and prefill != decode else None


def _word(worker: Worker, key: str, default: str) -> str:
    if key == MANAGER_V2:
        return manager(worker.text(RUNTIME, "auto"), worker.given.get(key, "auto"))
    return worker.text(key, default).lower()


def has_other(facts: Facts, service: Service) -> bool:
    """Whether another member of its cluster answers."""
    return any(other.name == service.name and not other.problem for other in facts.services)


def far_from_loopback(facts: Facts) -> str | None:
    """A service on another machine, if workers announce a loopback address."""
    remote = [s.url for s in facts.services if not (urlsplit(s.url).hostname or "").startswith(_LOOPBACK)]
    return next(iter(remote), None) if facts.bind_host.startswith(_LOOPBACK) else None


def lacks_trtllm(facts: Facts) -> bool:
    return facts.wants_tensorrt_llm and not facts.host.has_tensorrt_llm


def without_cuda_ipc(host: Host) -> str | None:
    """UCX's transports, if cuda_ipc is not among them; after a `^` they are the forbidden ones."""
    transports = host.environment.get("UCX_TLS", "all")
    names = set(transports.removeprefix("^").split(","))
    is_named = bool(names & {"cuda", "cuda_ipc"})
    is_without = is_named if transports.startswith("^") else not (is_named or "all" in names)
    return transports if is_without else None
