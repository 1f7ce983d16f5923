"""Instructions that the frontend's HTTP half runs per streamed token, counted by valgrind: repeatable.

    python benchmarks/token_instructions.py

Each token is a chunk and a write of its own, so the count includes waking the stream. It is the difference
between answers of 600 and 100 tokens."""

import asyncio
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))
import benchmarks  # noqa: F401  checks the packages
from baton.messages import GenerateRequest, TokenChunk, Usage
from frontend.record import Leg
from tests.scripted_frontend import MODEL, TOKENIZER, Client, ScriptedTokens

HI: dict[str, object] = {"messages": [{"role": "user", "content": "Hi"}]}
THINKING = {"type": "enabled", "budget_tokens": 2000}
BODIES: dict[str, dict[str, object]] = {
    "chat/completions": HI,
    "responses": {"input": "Hi", "store": False},
    "messages": HI | {"max_tokens": 3000, "thinking": THINKING},
}
LENGTHS = (5, 100, 600)  # the first warms up
CASES = [(path, channel) for path in BODIES for channel in ("final", "analysis")]
# Valgrind writes a count whenever this C function is called, which nothing else does.
MARK, MARK_IN_C = os.getpgrp, "os_getpgrp"


class PacedTokens(ScriptedTokens):
    """One token per chunk, after two turns of the event loop."""

    channel = ""
    num_tokens = 0

    async def generate(
        self,
        request: GenerateRequest,
        caller: str,  # noqa: ARG002  the protocol's
        on_taken: Callable[[], None],
        leg: Leg,  # noqa: ARG002  the protocol's
    ) -> AsyncGenerator[TokenChunk, None]:
        """A header, the tokens, the end."""
        on_taken()
        header = f"<|channel|>{self.channel}<|message|>"
        yield TokenChunk(token_ids=tuple(TOKENIZER.encode_text(header, allow_special=True)))
        for _ in range(self.num_tokens):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            yield TokenChunk(token_ids=(1,))
        yield TokenChunk(token_ids=(), finish_reason="length", usage=Usage(len(request.token_ids), 0, 0))


async def stream() -> None:
    """Every case at every length, with a mark before each answer and at the end."""
    tokens = PacedTokens("")
    client = Client(tokens)
    for path, tokens.channel in CASES:
        body = {"model": MODEL, "stream": True, **BODIES[path]}
        for tokens.num_tokens in LENGTHS:
            MARK()
            reply = await client.post(f"/v1/{path}", body)
            assert reply.status == 200, reply.body
            assert len(reply.writes) > tokens.num_tokens, "a write per token"
    MARK()


def counted() -> dict[str, int]:
    """Instructions per token of each case."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        tool = ["valgrind", "--tool=callgrind", f"--dump-before={MARK_IN_C}", f"--callgrind-out-file={out}"]
        command = [*tool, sys.executable, __file__, "--stream"]
        subprocess.run(
            command, check=True, stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONHASHSEED": "0"}
        )
        # The first count is that of the start.
        files = [Path(f"{out}.{2 + i}") for i in range(len(CASES) * len(LENGTHS))]
        totals = [
            int(re.findall(r"^(?:totals|summary): (\d+)", f.read_text(), re.MULTILINE)[0]) for f in files
        ]
    ends = range(len(LENGTHS) - 1, len(totals), len(LENGTHS))
    per_token = [round((totals[i] - totals[i - 1]) / (LENGTHS[-1] - LENGTHS[-2])) for i in ends]
    return {f"{path} {channel}": num for (path, channel), num in zip(CASES, per_token, strict=True)}


if __name__ == "__main__":
    if sys.argv[1:] == ["--stream"]:
        gc.disable()
        uvloop.run(stream())
    else:
        print(json.dumps(counted(), indent=2))
