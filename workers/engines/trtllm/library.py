"""The only module that imports TensorRT-LLM; also reads what its LLM class does not expose."""

import dataclasses
import importlib
import logging
import re
from typing import Any

from workers.flags import DisaggregationMode
from workers.settings_text import SettingsError

NEWEST = (1, 4)
OLDEST = (1, 3)  # 1.2 ignores `ignore_eos`, loses logprobs of a handoff, and its context ranks may die

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """The classes of the installed build; capabilities are read from them, not from the version."""

    version: str
    llm: Any
    args: Any
    sampling_params: Any
    disaggregated_params: Any
    guided_decoding_params: Any
    logprob: Any
    request_error: type[Exception]


def load_library(mode: DisaggregationMode = "agg") -> Library:
    """Import TensorRT-LLM. Raises SettingsError if it is missing or too old, or if `mode` hands KV over and
    Baton was not tried with the release.
    """
    try:
        root = importlib.import_module("tensorrt_llm")
        _check_version(root.__version__, mode)
        llmapi = importlib.import_module("tensorrt_llm.llmapi")
        return Library(
            version=root.__version__,
            llm=root.LLM,
            args=importlib.import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs,
            sampling_params=root.SamplingParams,
            disaggregated_params=root.DisaggregatedParams,
            guided_decoding_params=llmapi.GuidedDecodingParams,
            logprob=importlib.import_module("tensorrt_llm.executor.result").Logprob,
            request_error=importlib.import_module("tensorrt_llm.executor.utils").RequestError,
        )
    except (ImportError, AttributeError) as error:
        raise SettingsError(
            f"TensorRT-LLM cannot be imported: {error}; install tensorrt-llm 1.3 or 1.4 (release candidates; "
            "Python 3.12, NVIDIA's package index), or run its release container"
        ) from error


def _check_version(version: str, mode: DisaggregationMode) -> None:
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found is not None else None
    if release is not None and release < OLDEST:
        raise SettingsError(
            f"TensorRT-LLM {version} is too old; install tensorrt-llm 1.3 or 1.4 (release candidates), "
            "or run its release container"
        )
    if release is not None and release <= NEWEST:
        return
    if mode != "agg":
        raise SettingsError(
            f"TensorRT-LLM {version}: prefill and decode workers need 1.3 or 1.4, which Baton was "
            "tried with; or run the worker with --disaggregation-mode agg"
        )
    log.warning("TensorRT-LLM %s: Baton is checked against the settings of 1.3 and 1.4", version)


def fatal_error(llm: Any) -> object:
    """The fatal error that the executor recorded; None if none, or if this build hides it. Private to
    TensorRT-LLM, so it may be missing. Reads attributes only: safe from any thread.
    """
    return getattr(getattr(llm, "_executor", None), "_fatal_error", None)


def is_healthy(llm: Any) -> bool:
    """The LLM's health check if this build has one, else its executor's, else True. May block forever."""
    for owner, name in ((llm, "_check_health"), (getattr(llm, "_executor", None), "check_health")):
        check = getattr(owner, name, None)
        if callable(check):
            return bool(check())
    return True


def kv_capacity(llm: Any) -> tuple[int, int]:
    """Blocks and tokens of one rank's KV pool; zeros if this build does not report them."""
    capacity = getattr(llm, "get_kv_cache_capacity", None)
    told = capacity() if callable(capacity) else {}
    return int(told.get("maxNumBlocks", 0)), int(told.get("maxNumTokens", 0))


def embedding_bias(biases: dict[int, float], vocab_size: int) -> Any:
    """`biases` as TensorRT-LLM expects them: a float32 tensor [vocab_size]."""
    torch = importlib.import_module("torch")
    tensor = torch.zeros(vocab_size, dtype=torch.float32)
    for token_id, bias in biases.items():
        tensor[token_id] = bias
    return tensor
