"""Long prompts come to vLLM 0.25's second runner as arrays, so that no running answer waits for a conversion.

vLLM makes a tensor of a list of token ids within the step that begins with them: of 32,000, 3.7 ms of the
8 ms that this step took on an H200's host. Here the thread that reads requests makes an array of them.
"""

import array
import importlib
import logging
import weakref
from typing import Any

log = logging.getLogger(__name__)

_LONG = 1024
# Converted at a time, in less than 0.2 ms: the engine's thread waits for no more than that.
_SLICE = 4096

_read: weakref.WeakValueDictionary[str, "TokenIds"] = weakref.WeakValueDictionary()


class TokenIds(array.array):  # type: ignore[type-arg]  # not subscriptable before Python 3.12
    """int32, with what vLLM needs of a list."""

    def clear(self) -> None:
        """As a list's."""
        del self[:]


def convert_early() -> None:
    """Patch the engine and the second runner of this process; builds with others are left as they are."""
    try:
        engine = importlib.import_module("vllm.v1.engine.core").EngineCore
        states: Any = importlib.import_module("vllm.v1.worker.gpu.states").RequestState
        buffers: Any = importlib.import_module("vllm.v1.worker.gpu.buffer_utils")
        read, add, copy = engine.preprocess_add_request, states.add_request, buffers.async_tensor_h2d
    except (ImportError, AttributeError) as error:
        log.warning("answers will wait some milliseconds for each long prompt: %r", error)
    else:
        engine.preprocess_add_request = _reading(read)
        states.__init__, states.add_request = _collecting(states.__init__), _adding(add)
        buffers.async_tensor_h2d = _copying(copy)


def _reading(preprocess: Any) -> Any:
    def preprocess_add_request(self: Any, request: Any) -> Any:
        read = preprocess(self, request)
        tokens = read[0].prompt_token_ids or ()
        if len(tokens) >= _LONG:
            converted = TokenIds("i")
            for start in range(0, len(tokens), _SLICE):
                converted.extend(tokens[start : start + _SLICE])
            # Kept as long as the request, in the engine's process only.
            read[0].baton_token_ids = _read[read[0].request_id] = converted
        return read

    return preprocess_add_request


def _adding(add: Any) -> Any:
    def add_request(self: Any, *, req_id: str, all_token_ids: Any, **more: Any) -> None:
        converted = _read.get(req_id, ())
        is_whole = len(converted) == len(all_token_ids)  # a preempted request has its answer's tokens, too
        add(self, req_id=req_id, all_token_ids=converted if is_whole else all_token_ids, **more)

    return add_request


def _collecting(make: Any) -> Any:
    def __init__(self: Any, *given: Any, **named: Any) -> None:  # noqa: N807  it replaces one
        make(self, *given, **named)
        self.all_token_ids._staged_write_contents = TokenIds("i")  # noqa: SLF001  no other way

    return __init__


def _copying(copy: Any) -> Any:
    numpy = importlib.import_module("numpy")

    def async_tensor_h2d(data: Any, *given: Any, **named: Any) -> Any:
        return copy(numpy.array(data) if isinstance(data, TokenIds) else data, *given, **named)

    return async_tensor_h2d
