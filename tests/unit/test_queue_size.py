"""How many requests may wait: one setting for every engine, which the libraries do not get."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.flags import parse
from workers.engines.build import build_engine
from workers.engines.trtllm.library import load_library as load_trtllm
from workers.engines.trtllm.settings import TRTLLM_RULES
from workers.engines.vllm.library import load_library as load_vllm
from workers.engines.vllm.settings import VLLM_RULES
from workers.flags import WorkerSettings
from workers.settings import Loaded, SettingsError

Load = Callable[..., Loaded[dict[str, Any]]]
LIBRARIES: dict[str, Load] = {
    "trtllm": lambda **given: TRTLLM_RULES.load(load_trtllm().args, "agg", **given),
    "vllm": lambda **given: VLLM_RULES.load(load_vllm().engine_args, "agg", **given),
}


@pytest.mark.parametrize("load", LIBRARIES.values(), ids=LIBRARIES)
def test_a_library_does_not_get_the_queues_size(load: Load, tmp_path: Path) -> None:
    yaml = tmp_path / "engine.yaml"
    yaml.write_text("max_queue_size: 4096\n")

    loaded = load(yaml_path=yaml)
    assert loaded.values["max_queue_size"] == 4096
    assert f"max_queue_size=4096 ({yaml})" in loaded.lines()
    assert "max_queue_size" not in loaded.settings
    assert load().values["max_queue_size"] == 256
    assert load(yaml_path=yaml, typed={"max_queue_size": 0}).values["max_queue_size"] == 0


@pytest.mark.parametrize("engine", ["embedded", "mocker", "trtllm", "vllm"])
@pytest.mark.parametrize("text", ["max_queue_size: -1\n", "max_queue_size: many\n"])
def test_every_engine_refuses_a_queue_of_another_size(engine: str, text: str, tmp_path: Path) -> None:
    yaml = tmp_path / "engine.yaml"
    yaml.write_text(text)
    argv = ["--engine", engine, "--extra-engine-args", str(yaml)]
    with pytest.raises(SettingsError, match="max_queue_size"):
        build_engine(parse(WorkerSettings, argv, prog="p", description="d", environ={}))
