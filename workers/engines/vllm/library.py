"""Imports the installed vLLM for the worker, and sets the environment variables that it reads."""

import dataclasses
import importlib
import os
import random
from typing import Any

from baton.own_address import why_not_bound
from workers.engines.library.release import check_tried, part, release_of
from workers.engines.vllm.patches import NAMES, TRIED, WITHOUT, turned_off
from workers.engines.vllm.settings import SECOND_RUNNER
from workers.flags import DisaggregationMode
from workers.settings import SettingsError

WORKER_PID = "BATON_WORKER_PID"
SIDE_CHANNEL_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
SECOND_RUNNER_SINCE = (0, 29)  # for all models; before, not for gpt-oss


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """The classes of the installed build; capabilities are read from them, not from the version."""

    version: str
    llm: Any = part("vllm.v1.engine.async_llm:AsyncLLM")
    engine_args: Any = part("vllm.engine.arg_utils:AsyncEngineArgs")
    sampling_params: Any = part("vllm.sampling_params:SamplingParams")
    structured_outputs: Any = part("vllm.sampling_params:StructuredOutputsParams")
    delta: Any = part("vllm.sampling_params:RequestOutputKind.DELTA")
    dead: type[Exception] = part("vllm.v1.engine.exceptions:EngineDeadError")


def load_library(host: str = "127.0.0.1", mode: DisaggregationMode = "agg") -> Library:
    """Import vLLM, with its NIXL side channel on `host` and a free port.

    Raises SettingsError if it cannot be imported, or if `mode` hands KV over and no trial had the release."""
    if unknown := [name for name in turned_off() if name not in NAMES]:
        raise SettingsError(f"{WITHOUT}: {', '.join(unknown)}: allowed are {', '.join(NAMES)}")
    _prepare_environment(host)
    try:
        version = importlib.import_module("vllm").__version__
        check_tried("vLLM", version, mode, TRIED)
        is_default = (release_of(version) or SECOND_RUNNER_SINCE) >= SECOND_RUNNER_SINCE
        if not is_default and importlib.import_module("vllm.triton_utils").HAS_TRITON:
            os.environ.setdefault(SECOND_RUNNER, "1")  # draws by seed and position: sampled answers resume
        return Library(version=version)
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"vLLM cannot be imported: {error}; pip install '.[vllm]'") from error


def _prepare_environment(host: str) -> None:
    """Set what vLLM reads only from the environment; the user's values stay."""
    os.environ[WORKER_PID] = str(os.getpid())  # its processes end with this one, see `inside`
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork would copy threads and sockets
    # Useless here (it ignores a request's seed), and nvcc would compile it while vLLM loads.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_NIXL_SIDE_CHANNEL_HOST", host)
    if SIDE_CHANNEL_PORT not in os.environ:  # its default is the same for every worker
        os.environ[SIDE_CHANNEL_PORT] = str(_free_port(host))


def _free_port(host: str) -> int:
    """Below the ephemeral range: vLLM binds it once the model is loaded, and waits forever if it is taken."""
    for port in random.sample(range(20_000, 32_000), 100):
        if (problem := why_not_bound(host, port)) is None:
            return port
    raise SettingsError(f"--host {host}: no port for NIXL's side channel can be bound there: {problem}")
