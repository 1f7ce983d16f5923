"""The only module that imports TensorRT-LLM; also reads what its LLM class does not expose."""

import dataclasses
import importlib
from typing import Any

from workers.engines.library.release import check_tried, part, release_of
from workers.flags import DisaggregationMode
from workers.settings import SettingsError

TRIED = (1, 3), (1, 4)  # 1.2 ignores `ignore_eos`, loses logprobs of a handoff, and its context ranks may die
_INSTALL = (
    "install tensorrt-llm 1.3 or 1.4 (release candidates; Python 3.12, NVIDIA's package index), or run its "
    "release container"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """The classes of the installed build; capabilities are read from them, not from the version."""

    version: str
    llm: Any = part("tensorrt_llm:LLM")
    args: Any = part("tensorrt_llm.llmapi.llm_args:TorchLlmArgs")
    sampling_params: Any = part("tensorrt_llm:SamplingParams")
    disaggregated_params: Any = part("tensorrt_llm:DisaggregatedParams")
    guided_decoding_params: Any = part("tensorrt_llm.llmapi:GuidedDecodingParams")
    logprob: Any = part("tensorrt_llm.executor.result:Logprob")
    request_error: type[Exception] = part("tensorrt_llm.executor.utils:RequestError")


def load_library(mode: DisaggregationMode = "agg") -> Library:
    """Import TensorRT-LLM. Raises SettingsError if it is missing or too old, or if `mode` hands KV over and
    Baton was not tried with the release."""
    try:
        version: str = importlib.import_module("tensorrt_llm").__version__
        release = release_of(version)
        if release is not None and release < TRIED[0]:
            raise SettingsError(f"TensorRT-LLM {version} is too old; {_INSTALL}")
        check_tried("TensorRT-LLM", version, mode, TRIED)
        return Library(version=version)
    except (ImportError, AttributeError) as error:
        raise SettingsError(f"TensorRT-LLM cannot be imported: {error}; {_INSTALL}") from error


def fatal_error(llm: Any) -> object:
    """The fatal error that the executor recorded; None if none, or if this build hides it. Private to
    TensorRT-LLM, so it may be missing. Reads attributes only: safe from any thread."""
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
    reported: dict[str, int] = getattr(llm, "get_kv_cache_capacity", dict)()
    return reported.get("maxNumBlocks", 0), reported.get("maxNumTokens", 0)


def embedding_bias(biases: dict[int, float], vocab_size: int) -> Any:
    """`biases` as TensorRT-LLM expects them: a float32 tensor [vocab_size]."""
    torch = importlib.import_module("torch")
    tensor = torch.zeros(vocab_size, dtype=torch.float32)
    for token_id, bias in biases.items():
        tensor[token_id] = bias
    return tensor
