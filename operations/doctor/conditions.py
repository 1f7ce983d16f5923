"""What the rows of the table of findings are about, and when they hold: pure functions over the facts.

A function returns what its row's texts show as `found`; nothing, if there is no finding.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from urllib.parse import urlsplit

from operations.doctor.facts import GIB, Facts, Gpu, Host, Model, Service, Worker
from operations.doctor.memory import Budget, budget
from workers.engines.trtllm.settings import BACKEND, BUFFER, MANAGER_V2, RUNTIME, manager

# CUDA 12.8 needs driver 570; its guide asks for 575 on Blackwell. The 1.3 images contain CUDA 13, which needs
# driver 580 or, on data centre GPUs only, compatibility libraries.
CUDA_13_DRIVER = 580
FRACTION = "kv_cache_config.free_gpu_memory_fraction"
# The settings that prefill and decode must agree on, by code, with their defaults.
SHARED_SETTINGS = {
    "pair-dtype": ("kv_cache_config.dtype", "auto"),
    "pair-block": ("kv_cache_config.tokens_per_block", "32"),
    "pair-backend": (BACKEND, ""),
    "pair-runtime": (RUNTIME, "auto"),
    "pair-manager": (MANAGER_V2, "auto"),
}
_ENTRY = re.compile(r"\d+|GPU-[0-9a-fA-F-]+|MIG-[0-9a-fA-F/-]+")
_BYTES_PER_ID = 5  # the largest msgpack encoding of a prompt's token id
_LOOPBACK = ("127.", "localhost", "::1")
_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
_SLOW = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "CUDA_LAUNCH_BLOCKING")
_INDEX = "model.safetensors.index.json"
_FINAL = 1 << 30  # sorts after every release candidate


def one(facts: Facts) -> Iterable[Facts]:
    return (facts,)


def hosts(facts: Facts) -> Iterable[Host]:
    return (facts.host,)


def models(facts: Facts) -> Iterable[Model]:
    return (facts.model,)


def workers(facts: Facts) -> Iterable[Worker]:
    return facts.workers


def answering(facts: Facts) -> Iterable[Service]:
    return [service for service in facts.services if not service.problem]


def down(facts: Facts) -> Iterable[Service]:
    return [service for service in facts.services if service.problem]


def both(facts: Facts) -> Iterable[tuple[Worker, Worker]]:
    prefill, decode = facts.worker("prefill"), facts.worker("decode")
    return [(prefill, decode)] if prefill and decode else ()


def transceivers(facts: Facts) -> Iterable[Worker]:
    found = (facts.worker("prefill"), facts.worker("decode"))
    return [worker for worker in found if worker and worker.given and facts.wants_tensorrt_llm]


def drivers(facts: Facts) -> Iterable[tuple[str, int]]:
    found = sorted({gpu.driver for gpu in facts.used_gpus()})
    majors = [driver.partition(".")[0] for driver in found]
    return [(d, int(major) if major.isdecimal() else 0) for d, major in zip(found, majors, strict=True)]


def folders(facts: Facts) -> Iterable[Model]:
    return (facts.model,) if facts.model.is_folder and not is_cache(facts.model) else ()


def missing_files(facts: Facts) -> Iterator[tuple[str, str]]:
    for found in folders(facts):
        if "config.json" not in found.files:
            yield "config.json", "no engine can build the model"
        if "tokenizer.json" not in found.files:
            yield "tokenizer.json", "the frontend cannot turn text into tokens"
        if not found.shards and not found.index_problem:
            yield "*.safetensors", "no weights to load"
        if len(found.shards) > 1 and _INDEX not in found.files:
            yield _INDEX, "the engine cannot tell which file holds which weight"


def budgets(facts: Facts) -> Iterable[Budget]:
    return filter(None, (budget(facts, worker) for worker in facts.workers))


def loadable(facts: Facts) -> Iterable[Budget]:
    return [each for each in budgets(facts) if each.has_room(each.free_bytes)]


def slow_variables(facts: Facts) -> Iterable[tuple[str, str]]:
    return [(name, facts.host.environment.get(name, "")) for name in _SLOW if facts.wants_gpus]


def built(*, since: str = "", before: str = "", if_unknown: bool = False) -> Callable[[Facts], list[Worker]]:
    """TensorRT-LLM's workers of the builds from `since` on and before `before`; `if_unknown`: also if
    TensorRT-LLM is not installed here.
    """

    def each(facts: Facts) -> list[Worker]:
        build, low, high = (_build(text) for text in (facts.host.tensorrt_llm_version, since, before))
        is_in = (not low or build >= low) and (not high or build < high) if build else if_unknown
        return [w for w in facts.workers if is_in and w.given and facts.wants_tensorrt_llm]

    return each


def _build(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.?rc(\d+))?", version)
    if found is None:
        return ()
    major, minor, patch, candidate = found.groups()
    return int(major), int(minor), int(patch or 0), int(candidate) if candidate else _FINAL


def no_gpu(facts: Facts) -> str | None:
    return None if facts.nvidia.gpus else facts.nvidia.problem or "nvidia-smi lists none"


def oldest_driver(facts: Facts) -> int:
    return 575 if any(gpu.compute >= (10, 0) for gpu in facts.nvidia.gpus) else 570


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


def beyond_ranks(facts: Facts, worker: Worker) -> int:
    """How many GPUs more than ranks the worker has; 0 if that cannot be counted."""
    if not facts.nvidia.gpus or not facts.wants_gpus or bad_list(facts, worker) or absent(facts, worker):
        return 0
    return (len(worker.gpu_list) or len(facts.nvidia.gpus)) - worker.num_ranks


def shared_gpus(facts: Facts, worker: Worker) -> str | None:
    """The GPUs that a later worker uses as well."""
    if not facts.wants_gpus:
        return None
    later = facts.workers[facts.workers.index(worker) + 1 :]
    used = {gpu.index for other in later for gpu in facts.gpus_of(other)}
    return ", ".join(str(gpu.index) for gpu in facts.gpus_of(worker) if gpu.index in used)


def unpersistent(facts: Facts) -> str:
    return ", ".join(str(gpu.index) for gpu in facts.used_gpus() if gpu.persistence_mode == "Disabled")


def _ranks_gpus(facts: Facts, worker: Worker) -> list[Gpu]:
    return facts.gpus_of(worker)[: worker.tensor_parallel_size]


def mig(facts: Facts, worker: Worker) -> str | None:
    parts = [entry for entry in worker.gpu_list if entry.startswith("MIG-")]
    parts += [f"GPU {gpu.index}" for gpu in _ranks_gpus(facts, worker) if gpu.mig]
    return next(iter(parts), None)


Link = tuple[str, str, list[tuple[int, int]]]  # the pairs of GPUs that exchange data: what, if slow, indices


def links(facts: Facts) -> Iterator[Link]:
    slow = "all-reduce runs over PCIe: several times slower"
    for worker in facts.workers:
        yield worker.mode, slow, _indices(itertools.combinations(_ranks_gpus(facts, worker), 2))
    slow = "KV moves over PCIe or host memory: a longer time to first token"
    for prefill, decode in both(facts) if facts.wants_gpus else ():
        pairs = itertools.product(facts.gpus_of(prefill), facts.gpus_of(decode))
        yield "prefill to decode", slow, _indices(pairs)


def _indices(pairs: Iterable[tuple[Gpu, Gpu]]) -> list[tuple[int, int]]:
    return [(a.index, b.index) for a, b in pairs if a.index != b.index]


def no_peer(facts: Facts, link: Link) -> tuple[int, int, str] | None:
    """The first pair without peer access: one is enough, as eight GPUs have 28."""
    found = ((a, b, facts.nvidia.peers.get((a, b), "OK")) for a, b in link[2])
    return next((pair for pair in found if pair[2] != "OK"), None)


def no_nvlink(facts: Facts, link: Link) -> tuple[int, int, str] | None:
    found = ((a, b, facts.nvidia.links.get((a, b), "NV")) for a, b in link[2])
    return None if no_peer(facts, link) else next((p for p in found if not p[2].startswith("NV")), None)


def is_cache(model: Model) -> bool:
    return bool(model.is_folder and model.snapshot and "config.json" not in model.files)


def missing_shards(model: Model) -> str:
    return _some([shard.name for shard in model.shards if shard.size_bytes is None])


def broken_shards(model: Model) -> str:
    found = [s.name for s in model.shards if s.size_bytes is not None and s.size_bytes != s.whole_bytes]
    return _some(found)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def above(worker: Worker, large: str, small: str, other: Worker | None = None) -> tuple[int, int] | None:
    """Two settings, the second perhaps of another worker, if the first is larger."""
    first, second = worker.number(large), (other or worker).number(small)
    return (int(first), int(second)) if first is not None and second is not None and first > second else None


def unchunked(facts: Facts, worker: Worker) -> bool:
    """Whether the longest prompt takes more tokens than a step has."""
    room = worker.number("max_num_tokens") or 8192
    is_chunked = worker.value("enable_chunked_prefill") is True
    return facts.wants_tensorrt_llm and not is_chunked and room < (worker.number("max_seq_len") or 0)


def odd_heads(facts: Facts, worker: Worker) -> object:
    """The heads, if they can neither be split over the ranks nor replicated."""
    shape, size = facts.model.shape, worker.tensor_parallel_size
    if shape is None or not (
        shape.num_heads % size or (shape.num_kv_heads % size and size % shape.num_kv_heads)
    ):
        return None
    return f"{shape.num_heads} heads and {shape.num_kv_heads} KV heads"


def odd_experts(facts: Facts, worker: Worker) -> int:
    """The number of ranks that share the experts, if it does not divide ranks and experts."""
    size, shape = max(1, int(worker.number("moe_expert_parallel_size") or 1)), facts.model.shape
    is_odd = shape is not None and (worker.tensor_parallel_size % size or shape.num_experts % size)
    return size if is_odd else 0


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
        return manager(worker.text(RUNTIME, "auto"), worker.given.get(key, ("auto", ""))[0])
    return worker.text(key, default).lower()


def experts_on_hopper(facts: Facts, worker: Worker, word: str) -> bool:
    """Whether the worker asks for these experts on a Hopper GPU."""
    is_hopper = any(gpu.compute[0] == 9 for gpu in facts.gpus_of(worker)[:1])
    return is_hopper and worker.text("moe_config.backend", "AUTO").upper() == word


def has_other(facts: Facts, service: Service) -> bool:
    """Whether another member of its cluster answers."""
    return any(other.name == service.name for other in answering(facts))


def small_payload(facts: Facts, service: Service) -> int | None:
    """The longest prompt that fits the server's messages, if that is below the model's context."""
    room, context = service.max_payload_bytes, facts.model.shape.max_positions if facts.model.shape else 0
    return None if room is None or room >= _BYTES_PER_ID * context else max(1, room // _BYTES_PER_ID)


def far_from_loopback(facts: Facts) -> str | None:
    """A service on another machine, if workers announce a loopback address."""
    remote = [s.url for s in facts.services if not (urlsplit(s.url).hostname or "").startswith(_LOOPBACK)]
    return next(iter(remote), None) if facts.bind_host.startswith(_LOOPBACK) else None


def is_half_container(facts: Facts) -> bool:
    """Whether this container has only one of prefill and decode, on GPUs."""
    half = len(facts.modes & {"prefill", "decode"}) == 1
    return half and facts.host.in_container and facts.wants_gpus


def visible_only(host: Host) -> str | None:
    """The GPUs that the container sees, if not all."""
    seen = host.environment.get("NVIDIA_VISIBLE_DEVICES", "all")
    return None if seen in ("all", "void", "none", "") else seen


def can_run_image(host: Host) -> bool:
    return host.has_docker and not host.in_container


def lacks_trtllm(facts: Facts) -> bool:
    return facts.wants_tensorrt_llm and not facts.host.has_tensorrt_llm


def proxy(host: Host) -> str | None:
    """The variable of a proxy that requests to this machine would take."""
    variables = host.environment
    direct = (variables.get("no_proxy") or variables.get("NO_PROXY") or "").replace(" ", "").split(",")
    if {"*", "127.0.0.1", "127.0.0.0/8"} & set(direct):
        return None
    return next((name for name in _PROXIES if variables.get(name)), None)


def without_cuda_ipc(host: Host) -> str | None:
    """UCX's transports, if cuda_ipc is not among them; after a `^` they are the forbidden ones."""
    transports = host.environment.get("UCX_TLS", "all")
    names = set(transports.removeprefix("^").split(","))
    is_named = bool(names & {"cuda", "cuda_ipc"})
    is_without = is_named if transports.startswith("^") else not (is_named or "all" in names)
    return transports if is_without else None
