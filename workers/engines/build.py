"""Builds the engine that the settings select; imports nothing of the others."""

import dataclasses
import gc
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from baton.flags import Parsed
from baton.peer_tls import CERT
from workers.engine import Engine
from workers.engines.embedded.settings import EmbeddedSettings
from workers.engines.library.adapter import Adapter
from workers.engines.library.engine import LibraryEngine
from workers.engines.library.model_facts import ModelFacts, read_model_facts
from workers.engines.library.settings import Rules, check_speculation
from workers.engines.mocker import MockerEngine, MockerSettings
from workers.engines.trtllm.settings import TRTLLM_RULES
from workers.engines.vllm.settings import VLLM_RULES
from workers.flags import EngineName, WorkerSettings, typed_engine_flags
from workers.kv.transceiver import CacheTransceiver, choose_transceiver
from workers.settings import Given, Loaded, SettingsError, load_settings

log = logging.getLogger(__name__)

T = TypeVar("T")
_SM_SHARE, _CHECK_TIMEOUT_S = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", 120.0
_RULES = {"trtllm": TRTLLM_RULES, "vllm": VLLM_RULES}


def build_engine(parsed: Parsed[WorkerSettings]) -> tuple[Engine, list[str]]:
    """The engine, not started, and its effective settings as `key=value (source)` lines. Raises SettingsError
    with one line for the user: invalid YAML, missing model folder, engine not installed."""
    settings = parsed.settings
    if not (settings.model_path / "config.json").is_file():
        raise SettingsError(
            f"--model-path {settings.model_path}: no config.json in this folder; give a gpt-oss checkpoint"
        )
    assert settings.engine is not None  # set by `with_engine`
    gc.disable()  # a collection frees nothing during imports, and takes a fifth of torch's time
    try:
        return _BUILDERS[settings.engine](parsed)
    finally:
        gc.enable()


def given_settings(parsed: Parsed[WorkerSettings]) -> Given:
    """The engine settings given by flags and YAML, or chosen by Baton, by key path; loads no library. Raises
    SettingsError with the worker's message, unless only the library's build refuses them (`--check`)."""
    engine = parsed.settings.engine
    if engine in _RULES:
        return _RULES[engine].give(None, parsed.settings.disaggregation_mode, **_given(parsed))
    return _load_own(MockerSettings if engine == "mocker" else EmbeddedSettings, parsed).given


def _embedded(parsed: Parsed[WorkerSettings]) -> tuple[Engine, list[str]]:
    try:
        from workers.engines.embedded.engine import EmbeddedEngine
    except ImportError as error:
        raise SettingsError(
            f"the embedded engine is not installed ({error}); pip install '.[embedded]'"
        ) from error
    settings = parsed.settings
    _facts(settings.model_path)  # for what config.json lacks, transformers takes gpt-oss-120b's sizes
    loaded = _load_own(EmbeddedSettings, parsed)
    wire = loaded.settings.cache_transceiver_config.backend
    transceiver = None
    if settings.disaggregation_mode != "agg":
        try:
            transceiver = choose_transceiver(wire, host=settings.wires.address(), tls=settings.wires.tls())
        except (ImportError, OSError) as error:
            raise SettingsError(
                f"cache_transceiver_config.backend: {wire} is unavailable: {error}; use DEFAULT or TCP"
            ) from error
    engine = EmbeddedEngine(loaded.settings, model_path=settings.model_path, transceiver=transceiver)
    return engine, loaded.lines()


def _mocker(parsed: Parsed[WorkerSettings]) -> tuple[Engine, list[str]]:
    settings = parsed.settings
    loaded = _load_own(MockerSettings, parsed)
    transceiver = CacheTransceiver(settings.wires.address(), settings.wires.tls())
    engine = MockerEngine(loaded.settings, model_path=settings.model_path, transceiver=transceiver)
    return engine, loaded.lines()


def _trtllm(parsed: Parsed[WorkerSettings]) -> tuple[Engine, list[str]]:
    from workers.engines.trtllm.adapter import TrtllmAdapter
    from workers.engines.trtllm.library import load_library

    lib = load_library(parsed.settings.disaggregation_mode)
    return _library(parsed, TRTLLM_RULES, lib.args, partial(TrtllmAdapter, lib=lib))


def _vllm(parsed: Parsed[WorkerSettings]) -> tuple[Engine, list[str]]:
    from workers.engines.vllm.adapter import VllmAdapter
    from workers.engines.vllm.library import load_library

    lib = load_library(parsed.settings.wires.address(), parsed.settings.disaggregation_mode)
    return _library(parsed, VLLM_RULES, lib.engine_args, partial(VllmAdapter, lib=lib))


def _library(
    parsed: Parsed[WorkerSettings], rules: Rules, args: Any, adapter: Callable[..., Adapter]
) -> tuple[Engine, list[str]]:
    settings, mode = parsed.settings, parsed.settings.disaggregation_mode
    loaded = rules.load(args, mode, **_given(parsed, model=str(settings.model_path.absolute())))
    if mode != "agg" and settings.wires.tls() is not None:
        log.warning("kv=plain: %s moves KV itself, without the TLS of %s", settings.engine, CERT)
    model = _facts(settings.model_path)
    if not settings.check:
        _check_sm_share(settings.model_path)
    return LibraryEngine(adapter(loaded, model=model)), loaded.lines()


def _facts(model_path: Path) -> ModelFacts:
    try:
        return read_model_facts(model_path)
    except (OSError, ValueError) as error:
        raise SettingsError(f"--model-path {model_path}: {error}") from error


def _check_sm_share(model_path: Path) -> None:
    """Raises SettingsError if MPS leaves this process a part of the SMs with which products are not whole."""
    share = os.environ.get(_SM_SHARE)
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")  # noqa: S108  CUDA's default
    if share == "100" or not (share or (pipes / "control").exists()):
        return
    share = share or "(the server's)"
    command = [sys.executable, "-m", "workers.engines.library.product_check", str(model_path)]
    try:
        done = subprocess.run(  # noqa: S603  our own arguments
            command, stderr=subprocess.PIPE, text=True, timeout=_CHECK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SettingsError(f"{_SM_SHARE}={share}: no products within {_CHECK_TIMEOUT_S:g} s") from error
    if done.returncode:
        why = (done.stderr.splitlines() or [f"the check of products ended with {done.returncode}"])[-1]
        raise SettingsError(f"{_SM_SHARE}={share}: {why}")


def _load_own(cls: type[T], parsed: Parsed[WorkerSettings]) -> Loaded[T]:
    """The settings of an engine of Baton's own. Raises SettingsError."""
    loaded = load_settings(cls, **_given(parsed))
    check_speculation(loaded.given, parsed.settings.disaggregation_mode)
    return loaded


def _given(parsed: Parsed[WorkerSettings], **more: str) -> dict[str, Any]:
    """Where the engine's settings come from, as keywords of the loaders; `more` count as flags."""
    return {
        "yaml_path": parsed.settings.extra_engine_args,
        "override": parsed.settings.override_engine_args,
        "typed": {**more, **typed_engine_flags(parsed)},
    }


_BUILDERS: dict[EngineName, Callable[[Parsed[WorkerSettings]], tuple[Engine, list[str]]]] = {
    "embedded": _embedded,
    "mocker": _mocker,
    "trtllm": _trtllm,
    "vllm": _vllm,
}


# In order of preference. Not the mocker, which generates no real answers and must be requested.
_PACKAGES: dict[EngineName, str] = {"trtllm": "tensorrt_llm", "vllm": "vllm", "embedded": "transformers"}


def with_engine(
    parsed: Parsed[WorkerSettings],
    is_installed: Callable[[str], object] = importlib.util.find_spec,
) -> Parsed[WorkerSettings]:
    """The settings with the given engine, or else the first that is installed; between TensorRT-LLM and vLLM
    the user has to choose. Raises SettingsError."""
    if parsed.settings.engine is not None:
        return parsed
    installed = [name for name, package in _PACKAGES.items() if is_installed(package)]
    if not installed:
        raise SettingsError(
            "no engine is installed: run this in the worker image (deploy/README.md), or "
            "pip install '.[vllm]' or '.[embedded]'"
        )
    if {"trtllm", "vllm"} <= set(installed):
        raise SettingsError("TensorRT-LLM and vLLM are both installed; set --engine trtllm or --engine vllm")
    settings = dataclasses.replace(parsed.settings, engine=installed[0])
    return Parsed(settings, parsed.sources | {"engine": "chosen"})
