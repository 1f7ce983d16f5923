"""One GPU with one copy of the weights instead of two: memory, answers, the time to replace a killed worker.

`python benchmarks/shared_weights.py [--ways shared,copies] [--size 20b]` starts `launch/gpt_oss_vllm.sh
--one-gpu` with and without `--shared-weights`, asks for greedy answers, kills each role and asks again. Its
results are in benchmarks/results/shared_weights_20b.json. A way that ends in `-slices` has no MPS. Needs what
`one_gpu.py` needs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.agent_turns import VOCABULARY
from benchmarks.one_gpu import ENGINE, used_mib
from tests.gpu import random_weights
from tests.gpu.dummy_model import write_dummy_model
from tests.gpu.vllm_scene import descendants, gpus
from tests.launched import Launch
from tests.stack import MODEL
from tests.waiting import wait_for

ROOT = Path(__file__).parents[1]
READY_S = 300.0
NUM_PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 24, 60, 64  # below a block: no cache changes what is computed
LOADED = ("weights: ", "Model loading took ", "GPU KV cache size", "shared", "Error")


def answers(url: str) -> list[list[str]]:
    """The tokens of greedy answers, one after the other."""
    found = []
    for seed in range(NUM_PROMPTS):
        draw = random.Random(seed)
        body = {"model": MODEL, "prompt": [draw.randrange(*VOCABULARY) for _ in range(PROMPT_TOKENS)]}
        body |= {"max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=READY_S)
        response.raise_for_status()
        found.append(response.json()["choices"][0]["logprobs"]["tokens"])
    return found


def replaced(launch: Launch, role: str) -> dict[str, Any]:
    """Kill a role's processes; the seconds until another one serves, and what the log says of its load."""
    own, log = launch.pid_of(f"--disaggregation-mode {role}"), launch.run_dir / f"{role}-0.log"
    size = log.stat().st_size
    for pid in {own} | descendants(own):
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()

    def serves() -> bool:
        if not any(" ready worker=" in line for line in log.read_text()[size:].splitlines()):
            return False
        return len(httpx.get(f"{launch.url}/health", timeout=READY_S).json().get("instances", ())) == 2

    wait_for(serves, READY_S)
    return {"killed": role, "seconds": round(time.monotonic() - began, 1), "log": lines(log, size)}


def lines(log: Path, start: int = 0) -> list[str]:
    """What a worker's log says of its weights."""
    return [
        line[-200:] for line in log.read_text()[start:].splitlines() if any(word in line for word in LOADED)
    ]


def measured(way: str, folder: Path, scratch: Path, size: str) -> Iterator[dict[str, Any]]:
    """Figures at once, then after each kill."""
    flags = f"--override-engine-args {json.dumps(ENGINE, separators=(',', ':'))}"
    variables = {"MODEL_PATH": str(folder), "SERVED_MODEL_NAME": MODEL, "SKIP_DOCTOR": "1"}
    variables |= {"PREFILL_EXTRA_FLAGS": flags, "DECODE_EXTRA_FLAGS": flags}
    variables |= {"NO_MPS": "1"} if way.endswith("-slices") else {}
    arguments = [size, "--one-gpu", *(["--shared-weights"] if way.startswith("shared") else [])]
    before_mib, began = used_mib(), time.monotonic()
    launch = Launch(scratch / way, *arguments, script="gpt_oss_vllm.sh", engine=variables)
    try:
        output = launch.read_until("ready:")
        if "ready:" not in output:
            raise RuntimeError(output[-6000:])
        threading.Thread(target=list, args=[launch.popen.stdout], daemon=True).start()
        yield {"load_s": round(time.monotonic() - began, 1)}
        yield {role: lines(launch.run_dir / f"{role}-0.log") for role in ("prefill", "decode")}
        first = answers(launch.url)
        yield {"answers": first, "gpu_used_mib": used_mib() - before_mib}
        for role in ("prefill", "decode"):
            found = replaced(launch, role)
            again = answers(launch.url)
            num_equal = sum(one == other for one, other in zip(first, again, strict=True))
            yield {**found, "equal_answers": num_equal, "gpu_used_mib": used_mib() - before_mib}
    finally:
        launch.popen.terminate()
        launch.popen.wait(READY_S)


def main() -> None:
    """Each result is written at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default="shared,copies")
    parser.add_argument("--size", default="20b", choices=["20b", "120b"])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / f"shared_weights_{options.size}.json"
    results: dict[str, Any] = {"hardware": gpus()[:1], "model": f"gpt-oss-{options.size}, random weights"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_dummy_model(Path(scratch) / f"gpt-oss-{options.size}", options.size)
        plugin = random_weights.install(Path(scratch) / "plugin")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")])
        for way in options.ways.split(","):
            results[way] = []
            try:
                for row in measured(way, folder, Path(scratch), options.size):
                    print(way, json.dumps({k: v for k, v in row.items() if k != "answers"}), flush=True)
                    results[way].append(row)
                    file.write_text(json.dumps(results, indent=1) + "\n")
            except (RuntimeError, AssertionError, httpx.HTTPError) as error:  # the next way may work
                print(f"{way}: {error!r}", flush=True)
            for log in sorted((Path(scratch) / way).glob("*-0.log")):
                shutil.copy(log, options.results / f"{way}-{log.name}")
    found = [row["answers"] for way in options.ways.split(",") for row in results[way] if "answers" in row]
    if len(found) > 1:
        print(
            "equal between ways:", [sum(a == b for a, b in zip(found[0], o, strict=True)) for o in found[1:]]
        )


if __name__ == "__main__":
    main()
