"""Engine settings from flags and YAML, checked before any engine's library is loaded."""

from baton.flags import Parsed
from workers.engines.embedded.settings import EmbeddedSettings
from workers.engines.mocker_settings import MockerSettings
from workers.engines.trtllm.settings import give_trtllm_settings
from workers.engines.vllm.settings import give_vllm_settings
from workers.flags import EngineName, WorkerSettings, typed_engine_flags
from workers.settings import DataclassSchema, Given, build, read

_FOREIGN = {"trtllm": give_trtllm_settings, "vllm": give_vllm_settings}
_OWN: dict[EngineName, type] = {"embedded": EmbeddedSettings, "mocker": MockerSettings}


def given_settings(parsed: Parsed[WorkerSettings]) -> Given:
    """The engine settings given by flags and YAML, or chosen by Baton, by key path.

    Raises SettingsError with the worker's message; what the build of a third-party library refuses, only a
    worker can tell (`--check`).
    """
    settings, typed = parsed.settings, typed_engine_flags(parsed)
    path, override = settings.extra_engine_args, settings.override_engine_args
    assert settings.engine is not None
    if (give := _FOREIGN.get(settings.engine)) is not None:
        return give(None, settings.disaggregation_mode, yaml_path=path, override=override, typed=typed)
    schema = DataclassSchema(_OWN[settings.engine])
    given = read(schema, path, typed, override)
    build(schema, given, str(path or "engine settings"))
    return given
