"""`python -m baton shares`: the flags of two roles on one GPU, or one sentence."""

import json
from pathlib import Path

import pytest

from operations.commands import main
from tests import fake_gpu
from tests.fake_gpu import SHAPE_20B


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of gpt-oss-20b's shape, on a machine with one GPU."""
    monkeypatch.setenv("PATH", fake_gpu.install(tmp_path / "bin")["PATH"])
    (tmp_path / "config.json").write_text(json.dumps(SHAPE_20B))
    return tmp_path


def test_pytorch_may_take_the_share_vllm_finds_free(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shares", "--model-path", str(model)]) == 0
    prefill, decode, share = capsys.readouterr().out.splitlines()
    assert prefill == decode
    assert json.loads(decode.split()[-1])["gpu_memory_utilization"] == float(share)


def test_what_the_user_overrides_stays(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = '--max-seq-len 9000 --override-engine-args {"kv_cache_memory_bytes":1000,"block_size":32}'
    assert main(["shares", "--model-path", str(model), f"--prefill-flags={given}"]) == 0
    *roles, share = capsys.readouterr().out.splitlines()
    assert share == ""  # a limit of ours might be below what these flags need
    prefill, decode = (line.split() for line in roles)
    assert prefill[:2] == ["--max-seq-len", "9000"]
    chosen = json.loads(decode[-1])
    assert json.loads(prefill[-1]) == chosen | {"kv_cache_memory_bytes": 1000, "block_size": 32}


def test_a_draft_model_takes_its_part(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = model / "head"
    head.mkdir()
    with (head / "model.safetensors").open("wb") as file:
        file.truncate(1 << 30)
    yaml = model / "decode.yaml"
    yaml.write_text(f"speculative_config: {{method: eagle3, model: {head}, num_speculative_tokens: 3}}")
    kv_bytes = []
    for more in ([], ["--decode-engine-args", str(yaml)]):
        assert main(["shares", "--model-path", str(model), *more]) == 0
        line = capsys.readouterr().out.splitlines()[0]
        kv_bytes.append(json.loads(line.split()[-1])["kv_cache_memory_bytes"])
    assert kv_bytes[0] - kv_bytes[1] == pytest.approx(1.03 * (1 << 30), abs=4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu", "3"], "there is no GPU 3 (have 0)"),
        (["--decode-flags=--override-engine-args [1]"], "--override-engine-args: must be a JSON object"),
        (["--decode-flags=--override-engine-args {"], "--override-engine-args: not valid JSON"),
        (["--decode-flags=--max-seq-len x"], "--max-seq-len: invalid int value"),
    ],
)
def test_a_mistake_is_one_sentence(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["shares", "--model-path", str(model), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"error: one GPU: {says}")
    assert printed.err.count("\n") == 1


def test_neither_weights_of_an_unknown_size_nor_a_machine_without_a_driver_are_divided(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "config.json").write_text(json.dumps(SHAPE_20B | {"num_hidden_layers": 8}))
    assert main(["shares", "--model-path", str(model)]) == 2
    assert "has no weights" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(model))
    assert main(["shares", "--model-path", str(model)]) == 2
    assert "nvidia-smi is not installed" in capsys.readouterr().err
