"""Training batches: packs dialogues into rows in many processes, deterministically for a seed."""

import multiprocessing
import random
from collections.abc import Iterator
from multiprocessing.queues import Queue
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from frontend.harmony.conversation import render
from tools.demo_dialogues import Dialogue, completion
from tools.demo_tokenizer import encode

ROW_LENGTH = 2048
Rows = npt.NDArray[np.int32]


class Batch(NamedTuple):
    """Rows [B, T]: token ids, target ids (-100: none), position in and number of the document."""

    ids: Rows
    targets: Rows
    positions: Rows
    documents: Rows


def make_batch(tokenizer: Tokenizer, rng: random.Random, num_rows: int) -> Batch:
    """Fill rows with documents; only the assistant's tokens are targets."""
    shape = (num_rows, ROW_LENGTH)
    batch = Batch(
        np.zeros(shape, np.int32),
        np.full(shape, -100, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
    )
    waiting: list[tuple[list[int], int]] = []
    for row in range(num_rows):
        start, number = 0, 1
        while True:
            if not waiting:
                waiting = _documents(tokenizer, rng)
            ids, num_prompt = waiting[0]
            stop = start + len(ids)
            if stop > ROW_LENGTH:
                break
            batch.ids[row, start:stop] = ids
            batch.targets[row, start + num_prompt - 1 : stop - 1] = ids[num_prompt:]
            batch.positions[row, start:stop] = np.arange(len(ids))
            batch.documents[row, start:stop] = number
            waiting.pop(0)
            start, number = stop, number + 1
    return batch


def _documents(tokenizer: Tokenizer, rng: random.Random) -> list[tuple[list[int], int]]:
    found: list[tuple[list[int], int]] = []
    while not found:
        for example in Dialogue(rng).examples():
            prompt, answer = (
                encode(tokenizer, render(example.conversation)),
                encode(tokenizer, completion(example.answer)),
            )
            if len(prompt) + len(answer) <= ROW_LENGTH:
                found.append((prompt + answer, len(prompt)))
    return found


def _work(path: Path, seed: int, num_rows: int, turn: tuple[int, int], queue: "Queue[Batch]") -> None:
    """Make every n-th batch from the i-th on; `turn` is (i, n)."""
    tokenizer = Tokenizer.from_file(str(path))
    number, step = turn
    while True:
        queue.put(make_batch(tokenizer, random.Random(f"{seed} {number}"), num_rows))
        number += step


def batches(path: Path, *, seed: int, num_workers: int, num_rows: int) -> Iterator[Batch]:
    """Endless batches in a fixed order: batch i depends on seed and i only. `path` is that of
    tokenizer.json."""
    context = multiprocessing.get_context("spawn")
    queues: list[Queue[Batch]] = [context.Queue(maxsize=4) for _ in range(num_workers)]
    for worker, queue in enumerate(queues):
        args = (path, seed, num_rows, (worker, num_workers), queue)
        context.Process(target=_work, args=args, daemon=True).start()
    while True:
        for queue in queues:
            yield queue.get(timeout=120)
