"""Disaggregated vLLM on two GPUs with gpt-oss's shapes, over the HTTP API; one sequence per model size.

The tests run in order and build on each other: answers with a handoff are compared with those that the decode
worker gives alone once the prefill worker was killed."""

import asyncio
import itertools
import json
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LaunchServer
from tests.gpu.chance import as_many
from tests.gpu.vllm_scene import (
    Answer,
    Scene,
    abandon,
    ask_all,
    compiled_late,
    gpus,
    kill_worker,
    prompts,
    tensor_parallel_size,
    vllm_scene,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1500)]

SIZES = os.environ.get("BATON_GPU_MODELS", "20b,120b").split(",")
# concurrency: number of prompts, tokens of the longest
ROUNDS = {1: (10, 32_000), 16: (32, 32_000), 64: (128, 8_000)}
CONTROL = {1: 16, 16: 4, 64: 16}  # the concurrency of the round's control
LAST = "compiled_while_serving"  # the last result: the sequence is complete
NAMED = {"worker_lost", "handoff_failed", "no_workers", "engine_failure", "deadline_exceeded"}


@pytest.fixture(scope="module", params=SIZES)
def scene(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    launch_etcd: LaunchServer,
    launch_nats: LaunchServer,
) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp(request.param)
    with vllm_scene(folder, request.param, launch_etcd().url, launch_nats().url) as scene:
        ask_all(scene.stack, prompts(8, 32_000, seed=0), 4)  # the first request of a shape compiles kernels
        yield scene


@pytest.fixture(autouse=True)
def _results_of_each_test(scene: Scene) -> Iterator[None]:
    yield
    _write_results(scene)


def _write_results(scene: Scene) -> None:
    folder = Path(os.environ.get("BATON_GPU_RESULTS", "benchmarks/results"))
    tp = tensor_parallel_size()
    result = {
        "command": "tests/gpu/run.sh",
        "model": f"gpt-oss-{scene.size}, random weights (tests/gpu/random_weights.py)",
        "hardware": gpus(),
        "tensor_parallel_size": tp,
        "versions": {name: version(name) for name in ("torch", "vllm", "nixl-cu13")},
        **scene.figures,
    }
    name = f"vllm_disagg_{scene.size}" + (f"_tp{tp}" if tp > 1 else "") + ".json"
    unfinished = folder / f"unfinished_{name}"
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    if LAST in scene.figures:
        unfinished.replace(folder / name)


def _prompts(concurrency: int) -> list[list[int]]:
    num, longest = ROUNDS[concurrency]
    return prompts(num, longest, seed=concurrency)


def _round(scene: Scene, concurrency: int, at_a_time: int | None = None) -> list[Answer]:
    return ask_all(scene.stack, _prompts(concurrency), at_a_time or concurrency)


def _computed_anew(
    scene: Scene, asked: list[list[int]], concurrencies: tuple[int, int], **options: Any
) -> list[list[Answer]]:
    """Two rounds of answers whose prompts are not found in any cache."""
    return [
        ask_all(scene.stack, asked, concurrency, cache_salt=secrets.token_hex(4), **options)
        for concurrency in concurrencies
    ]


@pytest.mark.parametrize("concurrency", ROUNDS)
def test_every_prompt_is_handed_over_and_answered(scene: Scene, concurrency: int) -> None:
    before, moved = scene.stack.gauge("baton_handoffs_total"), _moved(scene)
    spent = {stage: _spent(scene, stage) for stage in ("prefill", "kv_move")}
    answers = scene.answers[f"handed over, {concurrency} at a time"] = _round(scene, concurrency)
    assert [answer.error for answer in answers] == [None] * len(answers)
    assert {len(answer.tokens) for answer in answers} == {32}
    assert scene.stack.gauge("baton_handoffs_total") - before == 2 * len(answers)
    scene.stack.wait_idle(30)
    (moved_bytes, move_s) = (now - then for now, then in zip(_moved(scene), moved, strict=True))
    scene.figures[f"kv_moved_{concurrency}_at_a_time"] = {
        "bytes": moved_bytes, "s": round(move_s, 3), "bytes_per_s": round(moved_bytes / move_s)
    }  # fmt: skip
    for stage, (total_s, num) in spent.items():
        now_s, now = _spent(scene, stage)
        scene.figures[f"{stage}_{concurrency}_at_a_time_s"] = round((now_s - total_s) / (now - num), 3)


def _spent(scene: Scene, stage: str) -> tuple[float, int]:
    return scene.stack.spent("baton_stage_seconds", f'stage="{stage}"')


def _moved(scene: Scene) -> tuple[float, float]:
    return scene.stack.gauge("baton_kv_moved_bytes_total"), scene.stack.gauge("baton_kv_move_seconds_total")


def test_a_seed_is_kept_over_the_handoff(scene: Scene) -> None:
    asked = prompts(4, 2_000, seed=7)
    rounds = [ask_all(scene.stack, asked, 1, temperature=1.0, seed=11) for _ in range(2)]
    scene.answers["seeded"] = rounds[0]
    other = ask_all(scene.stack, asked, 1, temperature=1.0, seed=12)
    assert _same(rounds[0], rounds[1])["first_tokens"] >= 3
    assert _same(rounds[0], other)["answers"] < 4


def test_the_next_turn_finds_its_beginning_in_prefills_cache(scene: Scene) -> None:
    first, added = prompts(16, 8_000, seed=8), prompts(16, 400, seed=9)
    ask_all(scene.stack, first, 16)
    turns = scene.asked_next = [begin + more for begin, more in zip(first, added, strict=True)]
    answers = scene.answers["next turn"] = ask_all(scene.stack, turns, 16)
    num_cached = sum(answer.num_cached_tokens for answer in answers)
    scene.figures["next_turn"] = {"prompt_tokens": sum(map(len, turns)), "cached_tokens": num_cached}
    assert num_cached > 0.9 * sum(map(len, first)) - 64 * len(first)


def test_clients_that_leave_in_any_phase_leave_no_pin(scene: Scene) -> None:
    rng = random.Random(3)
    asked = prompts(48, 32_000, seed=3)

    async def crowd() -> None:
        await asyncio.gather(*(abandon(scene.stack, prompt, rng.uniform(0.01, 6)) for prompt in asked))

    asyncio.run(crowd())
    began = time.monotonic()
    scene.stack.wait_idle(60)
    scene.figures["abandoned"] = {"requests": 48, "all_free_after_s": round(time.monotonic() - began, 1)}


def test_a_killed_prefill_worker_loses_no_request(scene: Scene) -> None:
    asked = prompts(64, 8_000, seed=5)
    answers, killed_s = _kill_under_load(scene, asked, lambda: kill_worker(scene.prefill))
    scene.answers["prefill killed"] = answers
    errors = [answer.error for answer in answers if answer.error]
    scene.figures["prefill_killed"] = {
        "requests": len(asked), "answered": len(asked) - len(errors), "errors": errors,
        "gpu_processes_gone_after_s": killed_s, "slowest_s": round(max(a.total_s for a in answers), 1),
    }  # fmt: skip
    assert not errors
    scene.stack.wait_ready(0, 1, 30)
    scene.stack.wait_idle(60)


def test_what_failed_pulls_left_is_not_found(scene: Scene) -> None:
    """The next turns of the prompts that were on their way when the prefill worker died."""
    asked = [
        begin + more
        for begin, more in zip(prompts(64, 8_000, seed=5), prompts(64, 200, seed=10), strict=True)
    ]
    found = ask_all(scene.stack, asked, 32)
    alone, control = _computed_anew(scene, asked, (32, 16))
    num_cached = sum(answer.num_cached_tokens for answer in found)
    scene.figures["prefill_killed"] |= {
        "next_turn_cached_tokens": num_cached,
        "next_turn_vs_calm": _same(found, alone),
        "next_turn_calm_vs_calm": _same(control, alone),
    }
    assert num_cached > 0
    _check_as_good_as(found, control, alone)


def test_the_decode_worker_alone_gives_the_same_answers(scene: Scene) -> None:
    """As often as the control: the decode worker itself with other batch sizes. Those change the order of
    sums, and random weights leave the top two tokens close together."""
    for concurrency in ROUNDS:
        handed = scene.answers[f"handed over, {concurrency} at a time"]
        alone, control = _computed_anew(scene, _prompts(concurrency), (concurrency, CONTROL[concurrency]))
        scene.answers[f"alone, {concurrency} at a time"] = alone
        scene.figures[f"equal_answers_{concurrency}_at_a_time"] = {
            "prompts": len(handed), "handed_over_vs_aggregated": _same(handed, alone),
            f"aggregated_vs_aggregated_{CONTROL[concurrency]}_at_a_time": _same(control, alone),
            "handed_over_s": round(sum(a.total_s for a in handed) / len(handed), 3),
            "aggregated_s": round(sum(a.total_s for a in alone) / len(alone), 3),
        }  # fmt: skip
        _check_as_good_as(handed, control, alone)


def test_answers_depend_on_the_far_half_of_their_prompts(scene: Scene) -> None:
    """Otherwise equal answers would prove nothing about the moved KV."""
    asked = _prompts(16)
    changed = [
        [token + 1 for token in prompt[: len(prompt) // 2]] + prompt[len(prompt) // 2 :] for prompt in asked
    ]
    same = _same(ask_all(scene.stack, changed, 16), scene.answers["alone, 16 at a time"])
    scene.figures["far_half_of_the_prompt_changed"] = {"prompts": len(asked), **same}
    assert same["answers"] <= len(asked) // 2


def test_the_next_turn_was_answered_right(scene: Scene) -> None:
    alone, control = _computed_anew(scene, scene.asked_next, (16, 4))
    scene.figures["next_turn"] |= {
        "handed_over_vs_aggregated": _same(scene.answers["next turn"], alone),
        "aggregated_vs_aggregated_4_at_a_time": _same(control, alone),
    }
    _check_as_good_as(scene.answers["next turn"], control, alone)


def test_answers_were_right_while_the_prefill_worker_died(scene: Scene) -> None:
    asked = prompts(64, 8_000, seed=5)
    alone, control = _computed_anew(scene, asked, (32, 16), max_tokens=300)
    answered = [answer.error is None for answer in scene.answers["prefill killed"]]
    killed, control, alone = (
        list(itertools.compress(answers, answered))
        for answers in (scene.answers["prefill killed"], control, alone)
    )
    scene.figures["prefill_killed"] |= {
        "vs_calm": _same(killed, alone),
        "calm_vs_calm": _same(control, alone),
    }
    _check_as_good_as(killed, control, alone)


def test_a_seeded_answer_is_the_same_without_a_handoff(scene: Scene) -> None:
    alone = ask_all(scene.stack, prompts(4, 2_000, seed=7), 1, temperature=1.0, seed=11)
    same = scene.figures["seeded"] = {"prompts": 4, **_same(scene.answers["seeded"], alone)}
    assert same["first_tokens"] >= 3


def test_a_killed_decode_worker_ends_each_request_with_a_named_error(scene: Scene) -> None:
    asked = prompts(64, 4_000, seed=6)
    answers, killed_s = _kill_under_load(scene, asked, lambda: kill_worker(scene.decode))
    errors = [answer.error for answer in answers if answer.error]
    scene.figures["decode_killed"] = {
        "requests": len(asked), "answered": len(asked) - len(errors), "errors": sorted(set(errors)),
        "gpu_processes_gone_after_s": killed_s, "slowest_s": round(max(a.total_s for a in answers), 1),
    }  # fmt: skip
    assert set(errors) <= NAMED
    assert errors


def test_kernels_have_variants_and_not_one_for_each_length(scene: Scene) -> None:
    """Prompts of hundreds of lengths were sent; the warm-up has compiled the variants."""
    late = {process.name: compiled_late(process) for process in (scene.prefill, scene.decode)}
    scene.figures[LAST] = late
    for found in late.values():
        assert sum(found.values()) <= 4


def _kill_under_load(
    scene: Scene, asked: list[list[int]], kill: Callable[[], float]
) -> tuple[list[Answer], float]:
    took: list[float] = []
    killer = threading.Timer(1.5, lambda: took.append(round(kill(), 2)))
    killer.start()
    answers = ask_all(scene.stack, asked, 32, max_tokens=300)
    killer.join()
    return answers, took[0]


def _same(left: list[Answer], right: list[Answer]) -> dict[str, int]:
    """The numbers of equal answers and of equal first tokens. No tokens at all are no answer."""
    assert not any(answer.error for answer in (*left, *right))
    return {
        "answers": sum(a.tokens == b.tokens for a, b in zip(left, right, strict=True)),
        "first_tokens": sum(a.tokens[:1] == b.tokens[:1] for a, b in zip(left, right, strict=True)),
    }


def _check_as_good_as(found: list[Answer], control: list[Answer], expected: list[Answer]) -> None:
    same, same_control = _same(found, expected), _same(control, expected)
    assert same_control["first_tokens"] >= len(found) / 2, "an engine so unlike itself proves nothing"
    for what, num_control in same_control.items():
        assert as_many(same[what], num_control, len(found)), what
