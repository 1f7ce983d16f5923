"""Engine settings: flag > YAML > default, and errors that name the source and the key path."""

import contextlib
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Literal

import pydantic
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workers.settings import SettingsError, fields_of, load_settings, read


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    tokens_per_block: int = 16
    fraction: float = 0.9

    def __post_init__(self) -> None:
        if not self.tokens_per_block:
            raise ValueError("too small")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    max_batch_size: int = 8
    device: str | None = None
    cache: Cache = dataclasses.field(default_factory=Cache)

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise ValueError("max_batch_size: at least 1")


def write(folder: Path, text: str) -> Path:
    path = folder / "engine.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("text", ["1e9", "1.5", "1.0e+3"])
def test_what_is_no_whole_number_is_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, f"max_batch_size: {text}\n")
    with pytest.raises(SettingsError, match=r"max_batch_size: .*: Expected `int`, got `(str|float)`"):
        load_settings(Engine, path, {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_batch_sise: 4", "max_batch_sise: unknown key; did you mean max_batch_size?"),
        ("cache: {tokens_per_blok: 4}", "cache.tokens_per_blok: unknown key; did you mean cache.tokens"),
        ("cache: {zzz: 4}", "cache.zzz: unknown key; known: fraction, tokens_per_block"),
        ("1: 4", "1: unknown key"),
        ("max_batch_size: many", "max_batch_size: 'many': Expected `int`, got `str`"),
        ("cache: 3", "cache: must be a mapping"),
        ("- 1", "must be a mapping"),
        ("[]", "must be a mapping"),
        ("false", "must be a mapping"),
        ("max_batch_size: 4\nmax_batch_size: 5", "max_batch_size is given twice"),
        ("max_batch_size: 0", "max_batch_size: at least 1"),
        ("cache: {tokens_per_block: 0}", "cache: too small"),
        ("a: &a [*a]", "an alias (*name): write the values out"),
        *(
            (text, "not valid YAML: ")
            for text in (
                "a: [", r'a: "\Uffffffff"', "\nmax_batch_size: 2024-99-99", "cache:\n  fraction: !!int ''",
                "max_batch_size: !!timestamp x", "a: !!python/object:os.x 1", "a: \x00", "a:\n\tb: 1\n",
                "<<: !!int ", "a: " + "{a: " * 3000, "? [a]\n: 1",
            )
        ),
    ],
)  # fmt: skip
def test_a_wrong_yaml_is_one_line_with_its_name(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SettingsError) as refused:
        load_settings(Engine, path, {})
    assert str(refused.value).startswith(f"{path}: ")
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_yaml_and_a_flag_without_a_setting_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: No such file"):
        load_settings(Engine, tmp_path / "none.yaml", {})
    for flag in ("tensor_parallel_size", "cache", "cache.fraction.x", "max_batch_size.x"):
        with pytest.raises(SettingsError, match=f"^flag: {flag.removesuffix('.x')}: "):
            load_settings(Engine, None, {flag: 2})


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"max_batch_size": 1e999}', '{"a": 1e999}'])
def test_a_wrong_override_is_one_line(text: str) -> None:
    with pytest.raises(SettingsError, match=r"^--override-engine-args: ") as refused:
        load_settings(Engine, None, {}, text)
    assert "\n" not in str(refused.value)


def test_pipes_endless_files_and_long_names_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "engine.yaml")
    for path in (tmp_path / "engine.yaml", Path("/dev/zero")):
        with pytest.raises(SettingsError, match="is not a file"):
            load_settings(Engine, path, {})
    with pytest.raises(SettingsError, match="File name too long"):
        load_settings(Engine, tmp_path / ("a" * 300), {})


@given(st.binary(max_size=200) | st.text().map(str.encode))
@example(b"[" * 3000)
def test_any_file_is_read_or_refused(content: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(content)
        file.flush()
        with contextlib.suppress(SettingsError):
            read(None, Path(file.name), {})


class Encoder(pydantic.BaseModel):
    width: int = 1


class Decoder(pydantic.BaseModel):
    depth: int = 2


class Model(pydantic.BaseModel):
    word: Literal["a", "B"] = "a"
    either: Encoder | Decoder | None = None
    chosen: Encoder | Decoder | None = pydantic.Field(default_factory=Decoder)


@dataclasses.dataclass
class Data:
    _hidden: int = 0
    derived: int = dataclasses.field(init=False, default=0)
    number: int = 3
    word: Literal["a", "B"] = "a"
    open_word: Literal["a", "B"] | str = "a"
    unset: int = None  # type: ignore[assignment]  # as vLLM has it
    plain: Cache | None = None


def test_a_settings_class_is_read_as_it_is() -> None:
    assert list(fields_of(Data)) == ["number", "word", "open_word", "unset", "plain"]
    fields = fields_of(Model)
    assert not fields["either"].fields  # which one is meant is unknown
    assert list(fields["chosen"].fields) == ["depth"]  # its default


@pytest.mark.parametrize(
    ("name", "value", "becomes"),
    [
        ("number", 4, 4),
        ("number", None, ValueError),
        ("unset", None, None),
        ("unset", "four", ValueError),
        ("word", "b", "B"),
        ("word", "c", ValueError),
        ("open_word", "c", "c"),
        ("plain", "anything", "anything"),  # its class's own check knows more
    ],
)
def test_values_are_checked_as_far_as_the_annotations_say(name: str, value: object, becomes: object) -> None:
    field = fields_of(Data)[name]
    if becomes is not ValueError:
        assert field.convert(value) == becomes
        return
    with pytest.raises(ValueError, match=r"Expected|must be one of a, B"):
        field.convert(value)
    assert fields_of(Model)["word"].convert("c") == "c"  # pydantic checks it


def test_a_yaml_of_more_than_a_mebibyte_is_not_read(tmp_path: Path) -> None:
    text = "max_batch_size: 4\n"
    load_settings(Engine, write(tmp_path, text + "#" * (2**20 - len(text))), {})
    with pytest.raises(SettingsError, match="1048577 bytes; at most 1048576 are allowed"):
        load_settings(Engine, write(tmp_path, text + "#" * (2**20 + 1 - len(text))), {})
