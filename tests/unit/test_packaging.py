"""Baton's packages are the ones imported, and neither side loads the other's dependencies."""

import subprocess
import sys
from pathlib import Path

import pytest

import baton
import frontend
import operations
import workers

ROOT = Path(__file__).parents[2]


def test_the_packages_imported_are_this_repositorys() -> None:
    for package in (baton, frontend, workers, operations):
        assert Path(package.__file__ or "").is_relative_to(ROOT)


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("frontend.__main__", {"torch", "transformers", "tensorrt_llm", "vllm", "workers", "grpc", "nats"}),
        ("workers.__main__", {"starlette", "uvicorn", "torch", "frontend", "grpc", "nats"}),
        ("baton.__main__", {"starlette", "torch", "grpc", "nats", "frontend", "workers", "operations"}),
        ("operations.commands", {"starlette", "torch", "grpc", "nats", "tokenizers", "workers", "rich"}),
        ("operations.bench", {"starlette", "torch", "grpc", "nats", "tokenizers", "workers", "plotext"}),
        (
            "operations.doctor.command",
            {"starlette", "torch", "transformers", "tensorrt_llm", "vllm", "nixl_cu13"},
        ),
    ],
)
def test_importing_a_process_loads_only_its_own_side(module: str, forbidden: set[str]) -> None:
    code = f"import sys, {module}; print(*sorted(m.split('.')[0] for m in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not forbidden & set(loaded.split())


@pytest.mark.parametrize("module", ["frontend", "workers", "baton status"])
def test_help_fits_one_screen(module: str) -> None:
    command = [sys.executable, "-m", *module.split(), "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert 5 < len(text.splitlines()) <= 49
