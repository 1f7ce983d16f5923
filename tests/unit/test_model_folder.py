"""A model by its id on the hub: found in the hub's cache, never downloaded."""

from pathlib import Path

import pytest

from baton.flags import parse
from baton.model_folder import model_folder
from frontend.__main__ import main as frontend
from workers.__main__ import main as worker
from workers.flags import WorkerSettings, with_model_folder

REPO = "openai/gpt-oss-tiny"


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", tmp_path / "hub")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def cached(hub: Path) -> Path:
    """The hub's cache has the model; returns its folder, that of the branch `main`."""
    folder = hub / "models--openai--gpt-oss-tiny"
    for commit in ("a1b2", "c3d4"):
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text("a1b2")
    return folder / "snapshots" / "a1b2"


def test_of_several_revisions_main_is_taken(hub: Path) -> None:
    folder = cached(hub)
    for given in (Path(REPO), folder, folder.parents[1]):
        assert model_folder(given) == folder


@pytest.mark.parametrize(
    "path",
    [REPO, "/no/such/model", "model", "../a/b", "a/b/c", f"/{'x' * 300}", "models--openai--gpt-oss-other"],
)
def test_a_folder_and_what_is_no_id_stay_what_they_are(path: str, hub: Path) -> None:
    cached(hub)
    Path(REPO).mkdir(parents=True)
    assert model_folder(Path(path)) == Path(path)


def test_a_worker_serves_it_under_its_id(hub: Path) -> None:
    folder = cached(hub)
    argv = ["--model-path", REPO]
    settings = with_model_folder(parse(WorkerSettings, argv, prog="p", description="d", environ={})).settings
    assert (settings.model_path, settings.model) == (folder, REPO)
    argv += ["--served-model-name", "mine"]
    settings = with_model_folder(parse(WorkerSettings, argv, prog="p", description="d", environ={})).settings
    assert (settings.model_path, settings.model) == (folder, "mine")


@pytest.mark.parametrize("main", [frontend, worker])
def test_a_model_that_is_not_here_is_one_line_with_the_command(
    main: object, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_FILE_REGISTRY", str(tmp_path / "registry"))
    assert callable(main)
    assert main(["--model-path", REPO, "--log-level", "error"]) == 2
    printed = capfd.readouterr().err
    assert printed.startswith(
        f"error: --model-path: {REPO} is neither a folder here nor a model in the hub's"
    )
    assert printed.endswith(f"hf download {REPO} --exclude 'original/*' --exclude 'metal/*'\n")
