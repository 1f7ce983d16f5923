"""Flags from dataclasses: precedence, sources, and one line for each error."""

import dataclasses
from pathlib import Path
from typing import Literal

import pytest

from baton import flags
from baton.connect import Wires
from baton.flags import flag, parse, without_secrets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
    mode: Literal["a", "b"] = flag("a", "a choice", env="TEST_BATON_MODE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    port: int = flag(80, "a port", env="TEST_BATON_PORT")
    folder: Path | None = flag(None, "a folder", alias="--dir")
    loud: bool = flag(False, "a switch", env="TEST_BATON_LOUD")
    share: float = flag(0.5, "at most 90 % of it", metavar="F")
    place: str = flag("here", "two names", env=("TEST_BATON_FIRST", "TEST_BATON_SECOND"))
    group: Group = dataclasses.field(default_factory=Group)

    def __post_init__(self) -> None:
        if self.port < 0:
            raise ValueError("--port: not below 0")


def read(*argv: str, **environ: str) -> Settings:
    return parse(Settings, argv, prog="p", description="d", environ=environ).settings


def test_a_typed_flag_beats_the_environment_which_beats_the_default() -> None:
    assert read().port == 80
    assert read(TEST_BATON_PORT="81").port == 81
    assert read("--port", "82", TEST_BATON_PORT="81").port == 82


def test_an_empty_variable_says_nothing_and_a_switch_is_on_or_off() -> None:
    assert read(TEST_BATON_PORT="").port == 80
    for text in ("1", "true", "YES", "on"):
        assert read(TEST_BATON_LOUD=text).loud
    for text in ("0", "false", "no", "off", ""):
        assert not read(TEST_BATON_LOUD=text).loud


def test_the_help_names_every_flag_with_its_default_and_its_variable(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        read("--help")
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for text in ("at most 90 % of it [0.5]", "a port [80] (env TEST_BATON_PORT)", "--dir", "{a,b}"):
        assert text in printed


def test_each_setting_has_its_source() -> None:
    parsed = parse(Settings, ["--port", "1"], prog="p", description="d", environ={"TEST_BATON_MODE": "b"})

    assert parsed.sources == {
        "port": "flag",
        "folder": "default",
        "loud": "default",
        "place": "default",
        "share": "default",
        "mode": "TEST_BATON_MODE",
    }
    assert parsed.typed("port")
    assert "mode=b (TEST_BATON_MODE)" in parsed.lines()


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        ("nats://bob:pass%40word@host:4222", "nats://***@host:4222"),
        ("tls://a:b@c@d:1", "tls://***@d:1"),
        (
            "http://u:p@a:2379,http://b:2379,http://u:q@c:2379",
            "http://***@a:2379,http://b:2379,http://***@c:2379",
        ),
        ("http://127.0.0.1:2379/path@x", "http://127.0.0.1:2379/path@x"),
        ('{"hf_token": "hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ01234567"}', '{"hf_token": "***"}'),
    ],
)
def test_credentials_are_not_printed(given: str, printed: str) -> None:
    assert without_secrets(given) == printed


@pytest.mark.parametrize(
    ("argv", "env", "says"),
    [
        (["--port", "x"], {}, "invalid int value"),
        (["--mode", "c"], {}, "invalid choice"),
        (["--nope"], {}, "unrecognized arguments: --nope"),
        (["--por", "1"], {}, "unrecognized arguments"),
        (["--port", "-1"], {}, "--port: not below 0"),
        ([], {"TEST_BATON_MODE": "c"}, "TEST_BATON_MODE=c, as --mode: invalid choice"),
        ([], {"TEST_BATON_PORT": "x"}, "TEST_BATON_PORT=x, as --port: invalid int value"),
    ],
)
def test_a_mistake_ends_with_status_2_and_says_what_is_wrong(
    argv: list[str], env: dict[str, str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read(*argv, **env)

    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_anothers_command_line_is_read_without_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_BATON_MODE", "b")
    assert flags.read(Settings, ["--port", "5", "--port=6"]).settings == Settings(port=6)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_a_worker_must_say_where_it_can_be_reached(host: str) -> None:
    with pytest.raises(ValueError, match="peers cannot reach it"):
        flags.read(Wires, [f"--host={host}"])
