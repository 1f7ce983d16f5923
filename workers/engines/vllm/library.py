"""The installed vLLM: the one file that imports it, and the environment that it is imported in."""

import dataclasses
import importlib
import os
import socket
from collections.abc import Sequence
from typing import Any, Protocol

from workers.settings import SettingsError

OLDEST, TOO_NEW = "0.22", "0.26"
WORKER_PID = "BATON_WORKER_PID"


class Completion(Protocol):
    """vLLM's CompletionOutput with RequestOutputKind.DELTA: what came since the last one."""

    token_ids: Sequence[int]
    logprobs: Sequence[dict[int, Any]] | None
    finish_reason: str | None


class Result(Protocol):
    """vLLM's RequestOutput. `kv_transfer_params` stand in the last one of a prompt that is handed over."""

    outputs: list[Completion]
    num_cached_tokens: int | None
    kv_transfer_params: dict[str, Any] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """The classes of the installed build; what they can take is asked of them, not of the version."""

    version: str
    llm: Any
    engine_args: Any
    sampling_params: Any
    structured_outputs: Any
    delta: Any
    dead: type[Exception]


def load_library(host: str = "127.0.0.1") -> Library:
    """Import vLLM, its NIXL side channel on `host` and a port of its own.

    Raises SettingsError if there is none that loads.
    """
    _prepare_environment(host)
    try:
        sampling = importlib.import_module("vllm.sampling_params")
        exceptions = importlib.import_module("vllm.v1.engine.exceptions")
        return Library(
            version=importlib.import_module("vllm").__version__,
            llm=importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM,
            engine_args=importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs,
            sampling_params=sampling.SamplingParams,
            structured_outputs=sampling.StructuredOutputsParams,
            delta=sampling.RequestOutputKind.DELTA,
            dead=exceptions.EngineDeadError,
        )
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"vLLM does not load here: {error}; pip install '.[vllm]' (vllm >= {OLDEST}, < {TOO_NEW})"
        ) from error


def _prepare_environment(host: str) -> None:
    """What vLLM reads from the environment only; what the user has set stays."""
    os.environ[WORKER_PID] = str(os.getpid())  # its processes end with this one, see `inside`
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork would copy threads and sockets
    os.environ.setdefault("VLLM_NIXL_SIDE_CHANNEL_HOST", host)
    if "VLLM_NIXL_SIDE_CHANNEL_PORT" not in os.environ:  # its default is the same for every worker
        with socket.socket() as probe:
            probe.bind((host, 0))
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(probe.getsockname()[1])
