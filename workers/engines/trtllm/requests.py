"""Submits requests to TensorRT-LLM, follows them until it releases them, and detects a broken engine."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from baton.errors import BatonError, EngineFailure, HandoffFailed, InvalidRequest, WorkerLost
from baton.messages import GenerateRequest
from workers.engines.calls import OpenCalls
from workers.engines.trtllm.calls import Abort, Call, as_error, let_go
from workers.engines.trtllm.library import Completion, Library, fatal_error

log = logging.getLogger(__name__)

_WEDGED_AFTER_S = 600.0  # on top of the KV timeout: it may wait in TensorRT-LLM's queue first


class Requests:
    """Submits and steps the requests of one LLM; `open` holds those inside it."""

    def __init__(self, lib: Library, kv_timeout_s: float, options: Mapping[str, Any]) -> None:
        """`options` are the keywords of `generate_async` for every request."""
        self.open: OpenCalls[Call] = OpenCalls()
        self._lib = lib
        self._kv_timeout_s = kv_timeout_s
        self._options = options
        self._given_up: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def opened(
        self, request: GenerateRequest, sampling: Any, params: Any, abort: Abort
    ) -> AsyncGenerator[Call, None]:
        """Submit the request; on exit it is over, aborted, or released in the background."""
        call = self._submit(request, sampling, params, abort)
        self.open.calls.add(call)
        try:
            yield call
        finally:
            if self.open.llm is None or self.open.broke.is_set() or call.abort_if_safe():
                self.open.calls.discard(call)
            else:
                task = asyncio.create_task(self._let_go(call), name=f"let-go-{request.request_id}")
                self._given_up.add(task)
                task.add_done_callback(self._given_up.discard)

    def _submit(self, request: GenerateRequest, sampling: Any, params: Any, abort: Abort) -> Call:
        deadline = asyncio.get_running_loop().time() + request.deadline_s
        salt = {"cache_salt": request.cache_salt} if request.cache_salt else {}
        options = {**self._options, **self._priority(request), **salt}
        try:
            result = self.open.llm.generate_async(
                request.token_ids,
                sampling,
                streaming=abort is not Abort.UNTIL_ANSWERED,
                disaggregated_params=params,
                **options,
            )
        except (ValueError, NotImplementedError, self._lib.request_error) as error:
            kind = HandoffFailed if abort is Abort.ONCE_ANSWERED else InvalidRequest
            raise kind(f"TensorRT-LLM refuses the request: {error}") from error
        except AssertionError as error:
            raise EngineFailure(f"TensorRT-LLM failed on this request: {error!r}") from error
        except Exception as error:  # undocumented, or a TypeError from another release's signature
            self.open.break_off(f"{type(error).__name__}: {error}")
            raise WorkerLost(self.open.reason) from error
        log.debug(
            "request_id=%s trtllm_id=%s disagg_id=%s",
            request.request_id,
            result.request_id,
            getattr(params, "disagg_request_id", None),
        )
        return Call(request, result, deadline, abort)

    async def step(self, call: Call) -> Completion:
        """The next response. Raises the client's BatonError; an error that no single request caused, or that
        TensorRT-LLM recorded as fatal, breaks the engine.
        """
        try:
            return await call.step()
        except BatonError:
            raise
        except (self._lib.request_error, AssertionError) as error:
            if (fatal := fatal_error(self.open.llm)) is None:
                raise as_error(error, call) from error
            self.open.break_off(f"TensorRT-LLM recorded a fatal error: {fatal}")
        except Exception as error:  # noqa: BLE001  an error of no single request breaks the engine
            self.open.break_off(f"{type(error).__name__}: {error}")
        raise WorkerLost(self.open.reason)

    async def _let_go(self, call: Call) -> None:
        try:
            await let_go(call, self._kv_timeout_s + _WEDGED_AFTER_S, self.open.break_off)
        finally:
            self.open.calls.discard(call)

    async def stop(self) -> Any:
        """End every request with WorkerLost; returns the LLM for its shutdown."""
        llm = self.open.stop()
        await asyncio.gather(*self._given_up)
        return llm

    def _priority(self, request: GenerateRequest) -> dict[str, float]:
        """TensorRT-LLM's priority: from 0 to 1, higher is sooner, 0.5 is the default."""
        if not request.priority:
            return {}
        if not self._lib.takes("priority"):
            raise InvalidRequest("this build of TensorRT-LLM does not support priority", param="priority")
        return {"priority": 0.5 - request.priority / 200}
