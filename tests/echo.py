"""A worker with scripted answers, over Baton's TCP plane: `python -m tests.echo SCRIPT`.

The script is JSON, a list of answers in tokens; a prompt's last `Case N` selects one. `tests.dynamo_double`
plays the same over Dynamo's runtime."""

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncGenerator, Collection, Sequence
from pathlib import Path

from baton.files import FilesDiscovery
from baton.messages import (
    FinishReason,
    GenerateRequest,
    Reply,
    Request,
    Role,
    TokenChunk,
    TokenLogprob,
    Usage,
    WorkerInfo,
    WorkerStats,
)
from baton.tcp import TcpTransport
from frontend.text.tokenizer import ModelTokenizer
from tests.stack import MODEL

DEMO = Path("models/demo")
NUM_CACHED = 2
LOGPROB, OTHER_TOKEN, OTHER_LOGPROB = -0.25, 3, -2.0
"""Of each token: its own, and that of the next likely one."""
_CASE = re.compile(r"Case (\d+)")
_STEP_S = 0.002


class Script:
    """Answers by the case that a prompt names."""

    def __init__(self, path: Path) -> None:
        self._answers: list[list[int]] = json.loads(path.read_text())
        self._tokenizer = ModelTokenizer.load(DEMO)

    def answer(self, prompt: Sequence[int], max_tokens: int, stops: Collection[int]) -> list[int]:
        """The answer, up to its first stop token."""
        ids = self._answers[int(_CASE.findall(self._tokenizer.decode(prompt))[-1])][:max_tokens]
        end = next((place for place, token_id in enumerate(ids, 1) if token_id in stops), len(ids))
        return ids[:end]


def _logprobs(token_id: int, num_top: int | None) -> tuple[TokenLogprob, ...]:
    if num_top is None:
        return ()
    tops = ((token_id, LOGPROB), (OTHER_TOKEN, OTHER_LOGPROB))
    return (TokenLogprob(token_id, LOGPROB, tops[:num_top]),)


async def main(path: Path) -> None:
    script = Script(path)

    async def respond(request: Request) -> AsyncGenerator[Reply, None]:
        if not isinstance(request, GenerateRequest):
            yield WorkerStats()
            return
        sampling, prompt = request.sampling, request.token_ids
        stops = () if sampling.ignore_eos else sampling.stop_token_ids
        ids = script.answer(prompt, sampling.max_tokens, stops)
        for place, token_id in enumerate(ids, 1):
            await asyncio.sleep(_STEP_S)  # computes
            is_last = place == len(ids)
            reason: FinishReason | None = None
            if is_last:
                reason = "stop" if token_id in stops else "length"
            usage = Usage(len(prompt), NUM_CACHED, place) if is_last or place == 1 else None
            yield TokenChunk((token_id,), reason, usage, _logprobs(token_id, sampling.logprobs))

    async with TcpTransport().serve("echo", respond) as address:
        worker = WorkerInfo(
            worker_id="echo",
            incarnation="echo.1",
            role=Role.DECODE,
            endpoint="dyn://baton.decode.generate",
            model=MODEL,
            model_path=str(DEMO),
            address=address,
            context_length=4096,
            engine="echo",
            engine_version="1",
        )
        async with FilesDiscovery(Path(os.environ["BATON_FILE_REGISTRY"])).register(worker):
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
