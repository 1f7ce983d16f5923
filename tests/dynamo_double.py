"""A worker of Dynamo's in Python, for tests: `python -m tests.dynamo_double ROLE FOLDER [--option VALUE]`.

It runs on Dynamo's runtime as dynamo.vllm does. Each token follows from the one before it and its place, so
a greedy answer goes on as it began; a sampled one depends on its seed and on its place in this answer. KV
that prefill holds for decode is a file in FOLDER/pins. Some seeds select another behaviour: see REFUSES."""

import argparse
import asyncio
import itertools
import os
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument
from dynamo.runtime import Context, DistributedRuntime

from tests.echo import DEMO, LOGPROB, NUM_CACHED, OTHER_LOGPROB, OTHER_TOKEN, Script

Chunk = dict[str, Any]
MODEL = "openai/gpt-oss-120b"
REFUSES, FAILS, FAILS_AS_DATA, SHUTS_DOWN, IS_STRANGE = range(103, 108)
"""Seeds: it raises InvalidArgument or KeyError, sends an error as data, drains, sends fields that nobody
knows."""
_ERRORS = {
    REFUSES: InvalidArgument("top_k must be even"),
    FAILS: KeyError("a key"),
    SHUTS_DOWN: EngineShutdown("draining"),
}


def next_token(last: int, place: int) -> int:
    """The token of a greedy answer at this place of the sequence."""
    return (last * 31 + place * 7) % 900 + 20


class Double:
    """One worker."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.pins = Path(options.folder) / "pins"
        self.pins.mkdir(parents=True, exist_ok=True)
        self.script = Script(Path(options.script)) if options.script else None
        self.numbers = itertools.count()

    async def answer(self, body: dict[str, Any], context: Context) -> AsyncGenerator[Chunk, None]:
        seed = body["sampling_options"].get("seed")
        if body.get("_HEALTH_CHECK"):
            yield {"token_ids": [1], "finish_reason": "length"}
        elif self.options.role == "prefill":
            await asyncio.sleep(self.options.prefill_s)  # computes
            name = f"{os.getpid()}-{next(self.numbers)}"
            (self.pins / name).touch()
            sys.stdout.write("pinned\n")
            sys.stdout.flush()
            yield {"token_ids": [1], "disaggregated_params": {"kv": name, "engine": self.options.engine}}
            details = {"cached_tokens": NUM_CACHED}
            yield {"finish_reason": "length", "completion_usage": {"prompt_tokens_details": details}}
        else:
            self._pull(body)
            if seed in _ERRORS:
                raise _ERRORS[seed]
            if seed == FAILS_AS_DATA:
                yield {"token_ids": [], "finish_reason": {"error": "out of memory\nTraceback"}}
                return
            async for chunk in self._tokens(body, context, seed):
                yield chunk

    def _pull(self, body: dict[str, Any]) -> None:
        result = body.get("prefill_result")
        if result is None:
            assert "x-bypass-remote-prefill" in body["annotations"]
            return
        if result["disaggregated_params"]["engine"] != self.options.engine:
            raise TypeError("the handoff is of another engine")
        (self.pins / result["disaggregated_params"]["kv"]).unlink()

    async def _tokens(self, body: dict[str, Any], context: Context, seed: int) -> AsyncGenerator[Chunk, None]:
        stops, ids = body["stop_conditions"], list(body["token_ids"])
        text: list[int] = []
        if self.script is not None:
            text = self.script.answer(ids, stops["max_tokens"], stops.get("stop_token_ids_hidden", ()))
        is_greedy = body["sampling_options"]["temperature"] == 0
        num = stops["max_tokens"] if self.script is None else len(text)
        details = (body.get("prefill_result") or {}).get("prompt_tokens_details")
        usage = {"prompt_tokens": len(ids), "prompt_tokens_details": details}
        strange = {"planet": {"name": "Mars"}, "text": None} if seed == IS_STRANGE else {}
        for i in range(num):
            await asyncio.sleep(self.options.step_s)  # computes
            if context.is_stopped():
                return
            token = next_token(ids[-1], len(ids)) if is_greedy else next_token(seed, i)
            ids.append(text[i] if text else token)
            chunk: dict[str, Any] = {"token_ids": ids[-1:], **strange}
            if body.get("output_options"):
                tops = [{"token_id": ids[-1], "logprob": LOGPROB, "rank": 1}]
                tops.append({"token_id": OTHER_TOKEN, "logprob": OTHER_LOGPROB})
                chunk |= {"log_probs": [LOGPROB], "top_logprobs": [tops]}
            if i == num - 1:
                is_stop = self.script is not None and ids[-1] in stops.get("stop_token_ids_hidden", ())
                chunk |= {"finish_reason": "stop" if is_stop else "length", "completion_usage": usage}
                if is_stop:  # as TensorRT-LLM
                    chunk |= {"token_ids": [], "stop_reason": ids[-1]}
            yield chunk


async def main(options: argparse.Namespace) -> None:
    loop = asyncio.get_running_loop()
    runtime = DistributedRuntime(loop, options.registry, options.plane)
    path = options.endpoint or f"dynamo.{'prefill' if options.role == 'prefill' else 'backend'}.generate"
    endpoint = runtime.endpoint(path)
    config = ModelRuntimeConfig()
    config.context_length, config.max_num_seqs = options.context_length, options.slots
    if options.pushes:
        config.set_disaggregated_endpoint("127.0.0.1", 9)
    roles = {"prefill": WorkerType.Prefill, "decode": WorkerType.Decode, "agg": WorkerType.Aggregated}
    peers = {"prefill": [[WorkerType.Decode]], "decode": [[WorkerType.Prefill]], "agg": []}
    is_prefill = options.role == "prefill"
    serving = asyncio.ensure_future(endpoint.serve_endpoint(Double(options).answer))
    await register_model(
        ModelInput.Text if options.reads_text else ModelInput.Tokens,
        ModelType.Prefill if is_prefill else ModelType.Chat | ModelType.Completions,
        endpoint,
        options.model_path,
        MODEL,
        worker_type=roles[options.role],
        runtime_config=config,
        needs=peers[options.role],
    )
    loop.add_signal_handler(signal.SIGTERM, runtime.shutdown)
    await serving


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["prefill", "decode", "agg"])
    parser.add_argument("folder")
    parser.add_argument("--registry", default="file")
    parser.add_argument("--plane", default="tcp")
    parser.add_argument("--endpoint")
    parser.add_argument("--engine", default="double")
    parser.add_argument("--model-path", default=str(DEMO))
    parser.add_argument("--context-length", type=int, default=4096)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--step-s", type=float, default=0.002)
    parser.add_argument("--prefill-s", type=float, default=0.0)
    parser.add_argument("--pushes", action="store_true")
    parser.add_argument("--reads-text", action="store_true")
    parser.add_argument("--script", help="see tests.echo")
    asyncio.run(main(parser.parse_args()))
