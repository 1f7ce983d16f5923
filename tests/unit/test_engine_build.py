"""Building an engine: its imports are not interrupted by the garbage collector."""

import gc

import pytest

from baton.flags import parse
from workers.engines.build import build_engine
from workers.engines.loading import importing
from workers.flags import WorkerSettings


def test_no_garbage_is_collected_while_an_engine_is_imported() -> None:
    began: list[str] = []
    line = ["--engine", "mocker", "--model-path", "models/demo"]
    parsed = parse(WorkerSettings, line, prog="p", description="d", environ={})
    before = gc.get_threshold()
    gc.callbacks.append(lambda phase, _: began.append(phase))
    try:
        gc.set_threshold(1)
        build_engine(parsed, ("w", "i"))
    finally:
        gc.set_threshold(*before)
        gc.callbacks.pop()
    assert len(began) < 200  # before and after the imports; hundreds otherwise


def test_a_failed_import_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()
