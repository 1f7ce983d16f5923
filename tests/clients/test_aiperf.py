"""AIPerf against the running stack: the guide's command, scaled down to seconds."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.stack import MODEL, ROOT, running_stack
from tests.waiting import scaled

NUM_TOKENS = 24
# From the guide; numbers are smaller.
GUIDE = [
    *("--endpoint-type", "chat", "--endpoint", "/v1/chat/completions", "--streaming"),
    *("--synthetic-input-tokens-mean", "1000", "--synthetic-input-tokens-stddev", "0"),
    *("--output-tokens-mean", str(NUM_TOKENS), "--output-tokens-stddev", "0"),
    *("--extra-inputs", f"max_tokens:{NUM_TOKENS}", "--extra-inputs", f"min_tokens:{NUM_TOKENS}"),
    *("--extra-inputs", "ignore_eos:true", "--extra-inputs", '{"nvext":{"ignore_eos":true}}'),
    *("--concurrency", "16", "--request-count", "48", "--warmup-request-count", "8"),
    *("--num-dataset-entries", "32", "--random-seed", "100"),
    *("-H", "Authorization: Bearer NOT USED", "-H", "Accept: text/event-stream"),
]


@pytest.mark.parametrize("engine", ["mocker", "embedded"])
def test_the_guides_benchmark_runs_without_an_error(engine: str, tmp_path: Path) -> None:
    with running_stack(tmp_path, engine) as stack:
        command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", MODEL, *GUIDE]
        command += ["--tokenizer", str(ROOT / "models/demo"), "--url", stack.url.removeprefix("http://")]
        command += ["--artifact-dir", str(tmp_path / "aiperf"), "--ui", "none"]
        limit_s = scaled(240)
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=limit_s, cwd=tmp_path, check=False
        )
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
        stack.wait_idle()

    found: dict[str, Any] = json.loads((tmp_path / "aiperf/profile_export_aiperf.json").read_text())
    assert found["error_summary"] == []
    assert found["request_error_rate"]["avg"] == 0
    assert found["request_count"]["avg"] == 48
    # Every answer is as long as was asked for, and its usage came with the stream.
    tokens = found["usage_completion_tokens"]
    assert (tokens["min"], tokens["max"]) == (NUM_TOKENS, NUM_TOKENS)
    assert found["usage_prompt_tokens"]["min"] >= 1000
    assert found["time_to_first_token"]["p99"] > 0
    assert found["inter_token_latency"]["avg"] > 0
