"""The API keys file: what a line may be, and who may write it."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from frontend.http.keys import MAX_FILE_BYTES, ApiKey, key_of, line_of, parse_keys, presented, read_keys
from operations.commands import main

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", fullmatch=True)


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def keys_file(folder: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path = folder / "api-keys"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


secrets = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)


@given(st.dictionaries(names, st.sets(secrets)), st.sampled_from(["\n", "\r\n", "\n\n# a comment\n \t\n"]))
def test_every_key_is_found_under_its_name_and_no_other(clients: dict[str, set[str]], between: str) -> None:
    made = {key: name for name, keys in clients.items() for key in keys}
    text = between.join(line_of(name, key) for key, name in made.items())

    keys = parse_keys(text)

    assert keys == {digest(key): (name, False) for key, name in made.items()}
    for key, name in made.items():
        assert key_of(keys, [(b"x-api-key", key.encode())]) == (name, False)
        assert key_of(keys, [(b"x-api-key", digest(key).hex().encode())]) is None


@given(st.text() | st.lists(st.text(alphabet="ab0 #=\n\t")).map("".join))
@example("alice " + "0" * 64 + "\x85bob " + "1" * 64)
@example("#bob " + "1" * 64)
def test_any_text_is_read_or_refused_by_line_without_quoting_it(text: str) -> None:
    try:
        keys = parse_keys(text)
    except ValueError as error:
        number = str(error).split(":")[0].removeprefix("line ")
        assert text.split("\n")[int(number) - 1].strip()
    else:
        lines = [line for line in text.split("\n") if line.strip() and not line.strip().startswith("#")]
        assert len(keys) == len(lines)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("alice sk-a-secret", "line 1: the second word must be the key's SHA-256: 64 hexadecimal digits"),
        ("alice", "line 1: the second word must be the key's SHA-256: 64 hexadecimal digits"),
        ("\n-a " + "0" * 64, "line 2: the name must be 1 to 64 letters, digits or ._@-, and begin with a le"),
        (f"a {'0' * 64} b", "line 1: only NAME SHA256 and `admin` are allowed"),
        (f"a {'0' * 64} admin admin", "only NAME SHA256 and `admin`"),
        (f"a {'0' * 64} requests-per-minute=9", "limits per minute are no longer supported"),
        (f"a {'0' * 64}\nb {'0' * 64}", "line 2: this key is already in the file"),
        (b"\xff", "is not UTF-8 text"),
    ],
)
def test_a_file_with_an_error_is_refused(text: str | bytes, why: str, tmp_path: Path) -> None:
    path = keys_file(tmp_path, text)
    with pytest.raises(ValueError, match="api-keys") as refused:
        read_keys(path)
    assert why in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused(mode: int, tmp_path: Path) -> None:
    path = keys_file(tmp_path, line_of("alice", "k"), mode)
    with pytest.raises(ValueError, match=f"chmod go-w {path}"):
        read_keys(path)
    path.chmod(0o644)
    assert len(read_keys(path)) == 1


def test_a_file_of_more_than_sixteen_mebibytes_is_refused(tmp_path: Path) -> None:
    path = keys_file(tmp_path, "#" * MAX_FILE_BYTES)
    assert not read_keys(path)
    with path.open("a") as file:
        file.write("#")
    with pytest.raises(ValueError, match="has more than 16777216 bytes"):
        read_keys(path)


def test_a_key_comes_as_bearer_or_in_anthropics_header() -> None:
    assert presented([(b"authorization", b"bearer  a "), (b"x-api-key", b" b ")]) == [b"a", b"b"]
    assert (
        presented([(b"authorization", b"Basic a"), (b"authorization", b"Bearer "), (b"x-api-key", b"")]) == []
    )
    keys = parse_keys(line_of("alice", "a"))
    both = [(b"authorization", b"Bearer stale"), (b"x-api-key", b"a")]
    assert key_of(keys, both) == ("alice", False)


def test_the_tool_makes_a_key_and_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "alice"]) == 0
    out, err = capsys.readouterr()
    made = err.split()[-1]
    assert parse_keys(out) == {digest(made): ("alice", False)}
    assert len(made) > 43  # 256 bits
    assert main(["key", "--admin", "root"]) == 0
    assert [*parse_keys(capsys.readouterr().out).values()] == [ApiKey("root", is_admin=True)]
