"""Builds the engine that the settings select; imports nothing of the others."""

import logging
from collections.abc import Callable
from typing import TypeVar

from baton.flags import Parsed
from baton.peer_tls import CERT
from workers.engine import Engine
from workers.engines.loading import importing
from workers.flags import WorkerSettings, typed_engine_flags
from workers.settings import Loaded, load_settings
from workers.settings_text import SettingsError

T = TypeVar("T")
log = logging.getLogger(__name__)


def build_engine(parsed: Parsed[WorkerSettings], identity: tuple[str, str]) -> tuple[Engine, list[str]]:
    """The engine, not started, and its effective settings as `key=value (source)` lines.

    Raises SettingsError with one line for the user: invalid YAML, missing model folder, engine not installed.
    """
    settings = parsed.settings
    if not (settings.model_path / "config.json").is_file():
        raise SettingsError(
            f"--model-path {settings.model_path}: no config.json in this folder; give a gpt-oss checkpoint"
        )
    assert settings.engine is not None  # set by `with_engine`
    try:
        with importing():
            return _BUILDERS[settings.engine](parsed, identity)
    except SettingsError as error:
        if parsed.typed("engine"):
            raise
        hint = f"--engine defaults to {settings.engine} here; set it to use another engine"
        raise SettingsError(f"{error}; {hint}") from error


def _embedded(parsed: Parsed[WorkerSettings], identity: tuple[str, str]) -> tuple[Engine, list[str]]:
    try:
        from workers.engines.embedded.engine import EmbeddedEngine
    except ImportError as error:
        raise SettingsError(
            f"the embedded engine is not installed ({error}); pip install '.[embedded]'"
        ) from error
    from workers.engines.embedded.settings import EmbeddedSettings
    from workers.kv.choose import choose_transceiver

    settings = parsed.settings
    loaded = _load(EmbeddedSettings, parsed)
    wire = loaded.settings.cache_transceiver_config.backend
    transceiver = None
    if settings.disaggregation_mode != "agg":
        try:
            transceiver = choose_transceiver(wire, host=settings.wires.address(), tls=settings.wires.tls())
        except (ImportError, OSError) as error:
            raise SettingsError(
                f"cache_transceiver_config.backend: {wire} is unavailable: {error}; use DEFAULT or TCP"
            ) from error
    engine = EmbeddedEngine(
        loaded.settings,
        model_path=settings.model_path,
        role=settings.role,
        worker_id=identity[0],
        incarnation=identity[1],
        transceiver=transceiver,
    )
    return engine, loaded.lines()


def _mocker(parsed: Parsed[WorkerSettings], identity: tuple[str, str]) -> tuple[Engine, list[str]]:
    from workers.engines.mocker import MockerEngine
    from workers.engines.mocker_settings import MockerSettings
    from workers.kv.choose import choose_transceiver

    settings = parsed.settings
    loaded = _load(MockerSettings, parsed)
    engine = MockerEngine(
        loaded.settings,
        model_path=settings.model_path,
        worker_id=identity[0],
        incarnation=identity[1],
        transceiver=choose_transceiver("TCP", host=settings.wires.address(), tls=settings.wires.tls()),
    )
    return engine, loaded.lines()


def _trtllm(parsed: Parsed[WorkerSettings], identity: tuple[str, str]) -> tuple[Engine, list[str]]:
    from workers.engines.trtllm.engine import TrtllmEngine
    from workers.engines.trtllm.library import load_library
    from workers.engines.trtllm.settings import load_trtllm_settings

    settings = parsed.settings
    lib = load_library()
    loaded = load_trtllm_settings(
        lib.args,
        settings.disaggregation_mode,
        yaml_path=settings.extra_engine_args,
        override=settings.override_engine_args,
        typed={"model": str(settings.model_path), **typed_engine_flags(parsed)},
    )
    return _of_library(TrtllmEngine, loaded, lib, settings, identity), loaded.lines()


def _vllm(parsed: Parsed[WorkerSettings], identity: tuple[str, str]) -> tuple[Engine, list[str]]:
    from workers.engines.vllm.engine import VllmEngine
    from workers.engines.vllm.library import load_library
    from workers.engines.vllm.settings import load_vllm_settings

    settings = parsed.settings
    lib = load_library(settings.wires.address(), settings.disaggregation_mode)
    loaded = load_vllm_settings(
        lib.engine_args,
        settings.disaggregation_mode,
        yaml_path=settings.extra_engine_args,
        override=settings.override_engine_args,
        typed={"model": str(settings.model_path.absolute()), **typed_engine_flags(parsed)},
    )
    return _of_library(VllmEngine, loaded, lib, settings, identity), loaded.lines()


def _of_library(
    kind: Callable[..., Engine],
    loaded: object,
    lib: object,
    settings: WorkerSettings,
    identity: tuple[str, str],
) -> Engine:
    """A third-party engine. Raises SettingsError if the model folder is invalid."""
    if settings.disaggregation_mode != "agg" and settings.wires.tls() is not None:
        log.warning("kv=plain: %s moves KV itself, without the TLS of %s", settings.engine, CERT)
    worker_id, incarnation = identity
    try:
        return kind(loaded, lib, model_path=settings.model_path, worker_id=worker_id, incarnation=incarnation)
    except (OSError, ValueError) as error:
        raise SettingsError(f"--model-path {settings.model_path}: {error}") from error


def _load(cls: type[T], parsed: Parsed[WorkerSettings]) -> Loaded[T]:
    settings = parsed.settings
    return load_settings(
        cls, settings.extra_engine_args, typed_engine_flags(parsed), settings.override_engine_args
    )


_BUILDERS: dict[str, Callable[[Parsed[WorkerSettings], tuple[str, str]], tuple[Engine, list[str]]]] = {
    "embedded": _embedded,
    "mocker": _mocker,
    "trtllm": _trtllm,
    "vllm": _vllm,
}
