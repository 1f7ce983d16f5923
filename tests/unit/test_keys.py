"""The API keys file: what a line may be, who may write it, and what a changed file does."""

import asyncio
import hashlib
import logging
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.reread import Reread, kept_current
from frontend.http.limits import (
    MAX_FILE_BYTES,
    ApiKey,
    known,
    line_of,
    parse_keys,
    presented,
    read_keys,
)
from operations.key import key as key_tool
from tests.waiting import until

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}", fullmatch=True)


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def keys_file(folder: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path = folder / "api-keys"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


secrets = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1)
clients = st.builds(
    ApiKey, names, st.dictionaries(st.sampled_from(["requests", "tokens"]), st.integers(1, 10**12 - 1))
)


@given(
    st.lists(st.tuples(clients, st.sets(secrets)), unique_by=lambda made: made[0].name),
    st.sampled_from(["\n", "\r\n", "\n\n# a comment\n \t\n"]),
)
def test_every_key_is_found_under_its_name_and_no_other(
    clients: list[tuple[ApiKey, set[str]]], between: str
) -> None:
    made = {key: client for client, keys in clients for key in keys}
    text = between.join(line_of(client.name, key, **client.limits) for key, client in made.items())

    keys = parse_keys(text)

    assert keys == {digest(key): client for key, client in made.items()}
    for key, client in made.items():
        assert known(keys, [(b"x-api-key", key.encode())]) == client
        assert known(keys, [(b"x-api-key", digest(key).hex().encode())]) is None


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
        (
            "a " + "0" * 64 + " b",
            "line 1: only requests-per-minute=N and tokens-per-minute=N may follow, once",
        ),
        (f"a {'0' * 64} requests-per-minute=0", "line 1: only requests-per-minute=N and tokens-per-minute=N"),
        (
            f"a {'0' * 64} {'requests-per-minute=1 ' * 2}",
            "line 1: only requests-per-minute=N and tokens-per-",
        ),
        (
            f"a {'0' * 64} tokens-per-minute=1\na {'1' * 64}",
            "line 2: an earlier line of this name has other limits",
        ),
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
    assert known(keys, both) == ApiKey("alice")


async def test_files_are_kept_current_during_a_context_only(tmp_path: Path) -> None:
    path = keys_file(tmp_path, line_of("alice", "a"))
    keys = Reread([path], partial(read_keys, path))
    async with kept_current([keys], every_s=0.01):
        keys_file(tmp_path, line_of("robert", "b"))
        await until(lambda: list(keys.value.values()) == [ApiKey("robert")])
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = keys_file(tmp_path, line_of("alice", "a"))
    keys = Reread([path], partial(read_keys, path))
    keys_file(tmp_path, line_of("bob", "b"))
    keys.check()
    assert list(keys.value.values()) == [ApiKey("bob")]

    with caplog.at_level(logging.INFO):
        for break_it in (lambda: path.write_text("carol sk-secret"), lambda: path.chmod(0o666), path.unlink):
            break_it()
            keys.check()
            keys.check()
            assert list(keys.value.values()) == [ApiKey("bob")]
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 3
    assert "line 1: the second word" in errors[0]
    assert "secret" not in caplog.text

    keys_file(tmp_path, line_of("carol", "c"))
    keys.check()
    assert list(keys.value.values()) == [ApiKey("carol")]


def test_the_tool_makes_a_key_and_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert key_tool(["alice"]) == 0
    out, err = capsys.readouterr()
    made = err.split()[-1]
    assert parse_keys(out) == {digest(made): ApiKey("alice")}
    assert len(made) > 43  # 256 bits
    assert key_tool(["alice", "--requests-per-minute", "2", "--tokens-per-minute", "30"]) == 0
    out, err = capsys.readouterr()
    assert made not in err
    assert list(parse_keys(out).values()) == [ApiKey("alice", {"requests": 2, "tokens": 30})]
    assert key_tool(["alice", "--requests-per-minute", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: only requests-per-minute=N")
    assert key_tool(["two words"]) == key_tool([]) == 2
    assert capsys.readouterr().err.startswith("error: the name must be")
