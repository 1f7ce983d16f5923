"""The load tests and evaluations of the guides, with all their clients, against the mocker: none is refused.

What a profile of the launch scripts holds and how long it lets requests wait is its own; the timing is a
B200's, or slower where requests would not wait longer than people may."""

import asyncio
import json
import re
from collections import Counter
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from tests.launched import MOCKER, Run
from tests.stack import MODEL, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CONFIGS = ROOT / "engine_configs/gpt-oss-120b"


class Launches:
    """Runs launch scripts with the mocker in the engine's place."""

    def __init__(self, folder: Path, run: Run) -> None:
        self._folder = folder
        self._run = run

    def mocker(self, profile: str, num_ranks: int, **timing: Any) -> str:
        """A mocker's YAML: batch and queue are those of the profile's file, on this many ranks."""
        config = yaml.safe_load((CONFIGS / f"{profile}.yaml").read_text())
        num_batches = num_ranks if config["enable_attention_dp"] else 1
        sizes = {"max_batch_size": config["max_batch_size"] * num_batches}
        sizes["max_queue_size"] = config.get("max_queue_size", 256)
        path = self._folder / f"{profile}.yaml"
        path.write_text(yaml.safe_dump(sizes | timing))
        return str(path)

    def ready(self, script: str, *arguments: str, **environ: str) -> str:
        """The URL, once it serves."""
        launch = self._run(" ".join((script, *arguments)), MOCKER | environ, BATON_INSECURE="1")
        assert "ready:" in (output := launch.read_until("try:")), output
        return launch.url


@pytest.fixture
def launches(tmp_path: Path, run: Run) -> Launches:
    return Launches(tmp_path, run)


class Load:
    """Clients that send the same streamed request again and again, at once, whatever the answer was."""

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        self._port = int(url.rpartition(":")[2])
        text = json.dumps({"model": MODEL, "stream": True, **body})
        fields = (
            f"host: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
        )
        self._request = f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n{text}".encode()
        self.answers = Counter[str]()

    async def run(self, num_clients: int, num_requests: int) -> None:
        """Send that many, from that many clients at a time."""
        todo = iter(range(num_requests))

        async def client() -> None:
            for _ in todo:
                self.answers[await self._ask()] += 1

        await asyncio.gather(*(client() for _ in range(num_clients)))

    async def _ask(self) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(self._request)
        answer = await reader.read(-1)
        writer.close()
        is_whole = b"data: [DONE]" in answer and b'"error"' not in answer
        return "whole" if is_whole else answer.partition(b"\r\n\r\n")[0].decode()


def num_refused(url: str) -> float:
    page = httpx.get(f"{url}/metrics").text
    return sum(map(float, re.findall(r"^baton_refused_requests_total{.*} (\S+)$", page, re.MULTILINE)))


async def test_aiperf_with_256_clients_and_prompts_of_32000_tokens(launches: Launches) -> None:
    """Four H200 prefill 2 such prompts in a second, four B200 up to 5.6; with 3.3, clients wait for 60 s."""
    prefill = launches.mocker("prefill", 4, prefill_tokens_per_s=3.3 * 32_000, max_cached_tokens=0)
    decode = launches.mocker("decode", 4, decode_step_ms=12, max_cached_tokens=0)
    url = launches.ready(
        "gpt_oss_disagg.sh",
        PREFILL_ENGINE_ARGS=prefill,
        DECODE_ENGINE_ARGS=decode,
        FRONTEND_FLAGS="--max-wait-s 0",
    )
    message = {"role": "user", "content": "a " * 15_950}
    tokens = {"max_tokens": 256, "min_tokens": 256, "ignore_eos": True, "nvext": {"ignore_eos": True}}
    load = Load(url, "/v1/chat/completions", {"messages": [message], **tokens})

    await load.run(256, 264)

    assert load.answers == {"whole": 264}
    assert num_refused(url) == 0


async def test_bench_sh_with_4096_clients(launches: Launches) -> None:
    """1024 tokens in and out; an engine that sends every 20th token sends 51 times. Of five rounds, one."""
    timing = {"prefill_tokens_per_s": 8 * 44_500, "decode_step_ms": 100, "max_cached_tokens": 0}
    url = launches.ready(
        "gpt_oss_agg.sh", "low-latency-720", ENGINE_ARGS=launches.mocker("agg_low_latency_720", 8, **timing)
    )
    fields = {"max_tokens": 51, "ignore_eos": True, "temperature": 0.0, "repetition_penalty": 1.0}
    load = Load(url, "/v1/completions", {"prompt": list(range(1024)), **fields})

    await load.run(4096, 4100)

    assert load.answers == {"whole": 4100}
    assert num_refused(url) == 0


def test_evals_with_1584_threads_and_16_places(launches: Launches, tmp_path: Path) -> None:
    """`eval-dep-high`, of all profiles the one with the fewest places; an answer takes 0.6 s here."""
    script = tmp_path / "script.yaml"
    script.write_text(
        yaml.safe_dump([{"answers": ["<|channel|>final<|message|>The answer is B.<|return|>"]}])
    )
    timing = {"prefill_tokens_per_s": 8 * 44_500, "decode_step_ms": 40, "script": str(script)}
    url = launches.ready(
        "gpt_oss_agg.sh", "eval-dep-high", ENGINE_ARGS=launches.mocker("agg_eval_dep_high", 8, **timing)
    )
    question: Any = [{"role": "user", "content": "What is the answer? A, B, C or D? " * 30}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=24 * 60 * 60) as client:

        def sample(_: int) -> str | None:
            response = client.chat.completions.create(
                model="gpt-oss-120b",
                messages=question,
                reasoning_effort="high",
                temperature=1.0,
                max_tokens=32_768,
            )
            return response.choices[0].message.content

        with ThreadPool(1584) as threads:
            answers = Counter(threads.imap_unordered(sample, range(1584)))

    assert answers == {"The answer is B.": 1584}
    assert num_refused(url) == 0
