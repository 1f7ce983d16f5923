"""Guessed tokens on vLLM, prefill and decode apart on one GPU: answers are those without guesses, and outlive
a decode worker.

The demo model in float32, and half of gpt-oss-20b's layers with random weights. A worker without guesses, the
model PLAIN, is the reference; its answers in other batches are the control, since those differ at times, too.
"""

import dataclasses
import json
import os
import random
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.gpu import random_weights
from tests.gpu.chance import as_many
from tests.gpu.dummy_model import write_dummy_model
from tests.gpu.eagle_head import write_head
from tests.gpu.test_demo_model import VLLM
from tests.gpu.vllm_scene import Answer, ask_all, devices, gpus, kill_worker
from tests.stack import MODEL, ROOT, Process, Stack
from tests.waiting import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

LOAD_TIMEOUT_S = 600.0
PLAIN = "plain"
NUM_GUESSES = 3
BLOCK = 64
HEAD_TOKENS = [1000 + 37 * i for i in range(8)]
"""Those that answers consist of: a random head is then right about once in eight."""
LARGE = {
    "load_format": "dummy",
    "max_model_len": 12288,
    "gpu_memory_utilization": 0.17,
    "kv_cache_memory_bytes": 2_500_000_000,
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
}
SMALL = VLLM | {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1_000_000_000, "block_size": BLOCK}


@dataclasses.dataclass
class Scene:
    """`is_positional`: a sampled answer does not depend on the guesses."""

    stack: Stack
    decode: list[Process]
    longest: int
    is_positional: bool
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)


@pytest.fixture(scope="module", params=["demo-eagle3", "demo-lookup", "20b-eagle3"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    size, _, way = request.param.partition("-")
    folder = tmp_path_factory.mktemp(request.param)
    environ = {"CUDA_VISIBLE_DEVICES": devices(0, 1)}
    if way == "lookup":
        environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if size == "20b":
        environ[random_weights.ONLY] = ",".join(map(str, HEAD_TOKENS))
        environ["PYTHONPATH"] = os.pathsep.join(
            [str(random_weights.install(folder / "plugin")), os.environ.get("PYTHONPATH", "")]
        )
    model = _half_of_20b(folder / "20b") if size == "20b" else _demo(folder / "demo")
    stack = Stack(folder, environ)
    try:
        stack.frontend()
        override = SMALL if size == "demo" else LARGE
        guessing: dict[str, Any] = {}
        if way == "eagle3":
            head = write_head(folder / "head", model, HEAD_TOKENS)
            guessing = {"method": "eagle3", "model": str(head), "num_speculative_tokens": NUM_GUESSES}
        workers = [
            _worker(stack, mode, model, override, guessing, looks_up=way == "lookup" and mode == "decode")
            for mode in ("prefill", "decode", "decode")
        ]
        _worker(stack, "agg", model, override)
        stack.wait_ready(1, 3, LOAD_TIMEOUT_S)
        longest = 9000 if size == "20b" else 2000
        scene = Scene(stack, workers[1:], longest, way == "eagle3")
        ask_all(stack, _prompts(scene, 4, seed=0), 4)  # the first request of a shape compiles kernels
        yield scene
        _write_results(request.param, scene)
    finally:
        stack.stop()
        for process in stack.processes:
            sys.stdout.write(f"--- {process.name}\n{process.text()[-6000:]}\n")  # printed if a test failed


def _demo(folder: Path) -> Path:
    """The demo model with random logits of HEAD_TOKENS."""
    shutil.copytree(ROOT / "models/demo", folder)
    weights = load_file(folder / "model.safetensors")
    lm_head = weights["lm_head.weight"]
    lm_head.normal_(0, lm_head.shape[1] ** -0.5, generator=torch.Generator().manual_seed(2))
    random_weights.keep_rows(lm_head, HEAD_TOKENS)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _half_of_20b(folder: Path) -> Path:
    """Four workers with all layers do not fit on 80 GB."""
    path = write_dummy_model(folder, "20b") / "config.json"
    config = json.loads(path.read_text())
    half = config["num_hidden_layers"] // 2
    path.write_text(
        json.dumps(config | {"num_hidden_layers": half, "layer_types": config["layer_types"][:half]})
    )
    return folder


def _worker(
    stack: Stack,
    mode: str,
    model: Path,
    override: dict[str, Any],
    guessing: dict[str, Any] | None = None,
    *,
    looks_up: bool = False,
) -> Process:
    override = override | ({"speculative_config": guessing} if guessing else {})
    name = f"{mode}-{len(stack.processes)}"
    arguments = ["--engine", "vllm", "--model-path", str(model), "--name", name]
    arguments += ["--served-model-name", PLAIN if mode == "agg" else MODEL]
    arguments += ["--disaggregation-mode", mode, "--override-engine-args", json.dumps(override)]
    if "load_format" in override:
        arguments += ["--extra-engine-args", str(ROOT / f"engine_configs/vllm/gpt-oss-20b/{mode}.yaml")]
    arguments += ["--speculate", "lookup"] if looks_up else []
    return stack.start(name, "workers", *arguments)


def _write_results(name: str, scene: Scene) -> None:
    folder = Path(os.environ.get("BATON_GPU_RESULTS", "benchmarks/results"))
    result = {
        "command": "tests/gpu/run.sh -k guesses",
        "scene": name,
        "hardware": gpus()[:1],
        **scene.figures,
    }
    (folder / f"vllm_guesses_{name.replace('-', '_')}.json").write_text(json.dumps(result, indent=1) + "\n")


def _prompts(scene: Scene, num: int, seed: int) -> list[list[int]]:
    """Random ones of all lengths, a third of them around the end of a block: a worker with a head takes
    blocks for its guesses, too."""
    rng = random.Random(seed)
    near = [BLOCK * rng.randint(2, scene.longest // BLOCK - 1) + rng.randint(-3, 2) for _ in range(num // 3)]
    lengths = [scene.longest, *near, *(rng.randint(100, scene.longest) for _ in range(num - 1 - len(near)))]
    return [[rng.randrange(100, 3000) for _ in range(length)] for length in lengths]


def _guesses(scene: Scene) -> tuple[float, float]:
    return (
        scene.stack.gauge("baton_worker_accepted_guesses_total"),
        scene.stack.gauge("baton_worker_rejected_guesses_total"),
    )


def _check(
    scene: Scene, what: str, found: list[Answer], expected: list[Answer], control: list[Answer]
) -> None:
    """As many answers as expected as the control has."""
    assert [answer.error for answer in (*found, *expected, *control)] == [None] * 3 * len(found)
    same, same_control = (
        [sum(a.tokens[:n] == b.tokens[:n] for a, b in zip(answers, expected, strict=True)) for n in (1, None)]
        for answers in (found, control)
    )
    scene.figures[what] = {
        "prompts": len(found),
        "first_tokens_answers": same,
        "control_first_tokens_answers": same_control,
        "different_answers": len({answer.tokens for answer in expected}),
    }
    assert len({answer.tokens for answer in expected}) > len(expected) // 4, (
        "all are alike: this proves nothing"
    )
    assert same_control[0] >= len(found) / 2, "an engine so unlike itself proves nothing"
    assert all(
        as_many(num, of_control, len(found)) for num, of_control in zip(same, same_control, strict=True)
    )


def _compare(scene: Scene, what: str, num_tokens: int, **options: Any) -> None:
    asked = _prompts(scene, 24, seed=len(what))
    options |= {"max_tokens": num_tokens}
    handoffs = scene.stack.gauge("baton_handoffs_total")
    found = ask_all(scene.stack, asked, 4, **options)
    assert scene.stack.gauge("baton_handoffs_total") - handoffs == 2 * len(asked)
    expected, control = (ask_all(scene.stack, asked, n, model=PLAIN, **options) for n in (4, 1))
    _check(scene, what, found, expected, control)


def test_greedy_answers_are_those_without_guesses(scene: Scene) -> None:
    right, wrong = _guesses(scene)
    _compare(scene, "greedy", 48)
    wait_for(lambda: _guesses(scene)[0] > right and _guesses(scene)[1] > wrong)
    num_right, num_wrong = (now - then for now, then in zip(_guesses(scene), (right, wrong), strict=True))
    scene.figures["guesses"] = {"right": num_right, "wrong": num_wrong}
    steps = [
        each["tokens_per_step"] for each in scene.stack.health()["instances"] if each["role"] == "decode"
    ]
    scene.figures["tokens_per_step"] = steps
    assert any(step is not None and step > 1 for step in steps)


def test_sampled_answers_are_those_without_guesses(scene: Scene) -> None:
    if not scene.is_positional:
        pytest.skip("the first runner's draws depend on what was guessed")
    _compare(scene, "sampled", 48, temperature=1.0, seed=5)


def test_the_next_turn_finds_its_beginning(scene: Scene) -> None:
    first = _prompts(scene, 8, seed=50)
    ask_all(scene.stack, first, 4, max_tokens=1)
    turns = [prompt[: scene.longest - 200] + [7] * 150 for prompt in first]
    found = ask_all(scene.stack, turns, 4)
    expected, control = (ask_all(scene.stack, turns, n, model=PLAIN) for n in (4, 1))
    assert sum(answer.num_cached_tokens for answer in found) > 0
    _check(scene, "next turn", found, expected, control)


def test_answers_outlive_a_decode_worker(scene: Scene) -> None:
    """A killed worker adds no difference to those that guesses in other batches make."""
    num_tokens, asked = 1000, _prompts(scene, 12, seed=70)
    each = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 6}][: 1 + scene.is_positional]

    def ask(model: str, concurrency: int) -> list[Answer]:
        options = {"max_tokens": num_tokens, "model": model}
        with ThreadPoolExecutor() as pool:
            rounds = [pool.submit(ask_all, scene.stack, asked, concurrency, **options, **how) for how in each]
            return [answer for answers in rounds for answer in answers.result()]

    expected, plain, undisturbed = ask(PLAIN, 6), ask(PLAIN, 3), ask(MODEL, 6)
    generated = scene.stack.gauge("baton_worker_generated_tokens_total")
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(ask, MODEL, 6)
        wait_for(lambda: scene.stack.gauge("baton_worker_generated_tokens_total") > generated + 300)
        kill_worker(scene.decode[0])
        found = asking.result()
    assert 'baton_attempts_total{reason="worker_lost"}' in scene.stack.get("/metrics").text
    assert [answer.error for answer in found] == [None] * len(found)
    assert {len(answer.tokens) for answer in found} == {num_tokens}
    equal = {
        name: [_num_common(a, b) for a, b in zip(answers, expected, strict=True)]
        for name, answers in {"killed": found, "undisturbed": undisturbed, "without guesses": plain}.items()
    }
    scene.figures["outlived"] = {"equal_tokens": equal}
    num_killed, num_undisturbed = (equal[name].count(num_tokens) for name in ("killed", "undisturbed"))
    assert as_many(num_killed, num_undisturbed, len(found))


def _num_common(left: Answer, right: Answer) -> int:
    pairs = zip(left.tokens, right.tokens, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left.tokens), len(right.tokens)))


def test_nothing_is_held_when_all_is_answered(scene: Scene) -> None:
    scene.stack.wait_idle(30)
