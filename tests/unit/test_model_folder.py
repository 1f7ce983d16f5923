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
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cache(hub: Path, *commits: str, main: str = "") -> Path:
    """The hub's cache of the model with these revisions; returns the folder of the last one."""
    folder = hub / "models--openai--gpt-oss-tiny"
    for commit in commits:
        (folder / "snapshots" / commit).mkdir(parents=True)
        (folder / "snapshots" / commit / "config.json").write_text("{}")
    if main:
        (folder / "refs").mkdir()
        (folder / "refs/main").write_text(main)
    return folder / "snapshots" / commits[-1]


@pytest.mark.parametrize(
    ("variable", "value", "hub"),
    [
        ("HF_HUB_CACHE", "/given", "given"),
        ("HF_HOME", "/hf", "hf/hub"),
        ("XDG_CACHE_HOME", "/xdg", "xdg/huggingface/hub"),
        ("", "", ".cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_hubs_library_has_it(
    variable: str, value: str, hub: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(variable, f"{home}{value}")
    folder = cache(home / hub, "a1b2")
    assert model_folder(Path(REPO)) == folder


def test_of_several_revisions_main_is_taken(home: Path) -> None:
    other = cache(home / ".cache/huggingface/hub", "a1b2", "c3d4", main="a1b2\n")
    for given in (Path(REPO), other.parents[1]):
        assert model_folder(given) == other.with_name("a1b2")
    (other.with_name("a1b2") / "config.json").unlink()
    assert model_folder(Path(REPO)) == other


@pytest.mark.parametrize("path", [REPO, "/no/such/model", "model", "../a/b", "a/b/c", f"/{'x' * 300}"])
def test_a_folder_and_what_is_no_id_stay_what_they_are(path: str, home: Path) -> None:
    cache(home / ".cache/huggingface/hub", "a1b2")
    (home / REPO).mkdir(parents=True)
    assert model_folder(Path(path)) == Path(path)


def test_a_worker_serves_it_under_its_id(home: Path) -> None:
    folder = cache(home / ".cache/huggingface/hub", "a1b2")
    argv = ["--model-path", REPO]
    settings = with_model_folder(parse(WorkerSettings, argv, prog="p", description="d", environ={})).settings
    assert (settings.model_path, settings.model) == (folder, REPO)
    argv += ["--served-model-name", "mine"]
    settings = with_model_folder(parse(WorkerSettings, argv, prog="p", description="d", environ={})).settings
    assert (settings.model_path, settings.model) == (folder, "mine")


@pytest.mark.parametrize("main", [frontend, worker])
def test_a_model_that_is_not_here_is_one_line_with_the_command(
    main: object, home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_FILE_REGISTRY", str(home / "registry"))
    assert callable(main)
    assert main(["--model-path", REPO, "--log-level", "error"]) == 2
    printed = capfd.readouterr().err
    assert printed.startswith(
        f"error: --model-path: {REPO} is neither a folder here nor a model in {home}/.cache"
    )
    assert printed.endswith(f"hf download {REPO} --exclude 'original/*' --exclude 'metal/*'\n")
