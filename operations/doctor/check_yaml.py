"""Checks of the engine YAMLs as files: readable, and with keys that TensorRT-LLM knows."""

import difflib
from collections.abc import Iterator

from operations.doctor.facts import Facts, Worker
from operations.doctor.findings import Finding, error, warning
from operations.doctor.trtllm_keys import KEYS, OLD_KEYS


def alone(facts: Facts) -> Iterator[Finding]:
    """Can each file be read, and are its keys keys?"""
    for worker in facts.workers:
        if worker.yaml is None:
            continue
        path = worker.yaml.path
        if worker.yaml.problem:
            yield error(
                "yaml-bad", f"{path}: {worker.yaml.problem}",
                breaks=f"the {worker.role} worker ends at start",
                repair=f"edit {path}; engine_configs/README.md lists the keys",
            )  # fmt: skip
            continue
        for place in worker.yaml.duplicates:
            yield error(
                "yaml-twice", f"{place} is given twice",
                breaks="one of the two values is silently lost in other tools; Baton refuses the file",
                repair=f"remove one of them from {path}",
            )  # fmt: skip
        if facts.wants_tensorrt_llm:
            yield from _keys(worker, path)


def _keys(worker: Worker, path: str) -> Iterator[Finding]:
    assert worker.yaml is not None
    for key in dict.fromkeys(map(_checked_part, worker.yaml.values)):
        section, _, name = key.rpartition(".")
        known = KEYS.get(section, frozenset())
        if key in OLD_KEYS:
            yield error(
                "yaml-old-key", f"{path}: {key} is a key of older releases",
                breaks="TensorRT-LLM 1.3 refuses the file: invalid argument",
                repair=f"write {OLD_KEYS[key]}",
            )  # fmt: skip
        elif name not in known and (close := difflib.get_close_matches(name, known, 1, 0.8)):
            yield error(
                "yaml-unknown-key", f"{path}: {key} is no key of TensorRT-LLM",
                breaks=f"the {worker.role} worker ends at start",
                repair=f"write {section and section + '.'}{close[0]}",
            )  # fmt: skip
        elif name not in known:
            yield warning(
                "yaml-strange-key", f"{path}: {key} is no key of TensorRT-LLM 1.3 as doctor knows it",
                breaks=f"the {worker.role} worker ends at start, unless the installed build has that key",
                repair=f"remove {key}, or go on if your build knows it",
            )  # fmt: skip


def _checked_part(leaf: str) -> str:
    """`kv_cache_config.dtype` whole; of a section whose keys are not known here, the section only."""
    section, _, _ = leaf.partition(".")
    if section in OLD_KEYS or (section in KEYS[""] and section not in KEYS):
        return section
    return ".".join(leaf.split(".")[:2]) if section in KEYS else section
