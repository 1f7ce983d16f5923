"""What a body may be: refused, hinted, unknown and nested fields, no JSON; and where a fault is."""

import json
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from frontend.chat import ChatBody
from frontend.http.body import convert, decode
from frontend.responses.body import ResponseBody
from frontend.turn.fields import Refused
from tests.scripted_frontend import Client, ScriptedTokens

DEEP = 30_000  # fewer than MAX_PARTS


class Rock(msgspec.Struct, tag_field="kind", tag="rock"):
    refused: ClassVar[Refused] = {"color": (("grey",), "All are grey.")}
    hints: ClassVar[frozenset[str]] = frozenset({"weight"})
    name: str


class Plant(msgspec.Struct, tag_field="kind", tag="plant"):
    height: int


class Garden(msgspec.Struct):
    refused: ClassVar[Refused] = {"num": ((1, None), "Leave it out."), "is_wet": ((False,), "It is dry.")}
    hints: ClassVar[frozenset[str]] = frozenset({"mood"})
    shallow: ClassVar[frozenset[str]] = frozenset({"far"})
    things: list[Rock | Plant] = []
    center: Rock | None = None
    far: Plant | None = None


def read(raw: bytes | None = None, **fields: Any) -> tuple[Garden, tuple[str, ...]]:
    return decode(json.dumps(fields).encode() if raw is None else raw, Garden)


def refusal(raw: bytes | None = None, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        read(raw, **fields)
    return refused.value


ROCK = {"kind": "rock", "name": "r"}
PLANT = {"kind": "plant", "height": 3}


def test_unknown_fields_are_named_by_path_and_hints_are_not() -> None:
    assert read(mood="good", num=1, is_wet=False)[1] == ()
    assert read(zoo=1, age=2)[1] == ("age", "zoo")
    things = [{**ROCK, "weight": 7}, {**ROCK, "x": 1}, {**ROCK, "x": 2}, {**PLANT, "name": 1, "y": 2}]
    assert read(things=things)[1] == ("things[].name", "things[].x", "things[].y")
    assert read(center={**ROCK, "z": 1}, far={**PLANT, "z": 1})[1] == ("center.z",)
    assert read(num=1, is_wet=None, center={**ROCK, "color": "grey"})[1] == (), "harmless values"
    assert read(b'\xef\xbb\xbf{"zoo": 1}')[1] == ("zoo",), "after a byte order mark"


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"num": 2}, "num"),
        ({"num": 1.0}, "num"),
        ({"num": True}, "num"),
        ({"is_wet": True}, "is_wet"),
        ({"is_wet": 0}, "is_wet"),
        ({"center": {**ROCK, "color": "red"}}, "center.color"),
        ({"things": [PLANT, {**ROCK, "color": "red"}]}, "things[1].color"),
    ],
)
def test_what_is_not_supported_is_refused_by_path(fields: dict[str, Any], path: str) -> None:
    error = refusal(**fields)
    assert error.param == path
    assert error.message.startswith(f"`{path}` is not supported. ")


def test_a_struct_without_its_optional_tag_is_searched() -> None:
    untagged = {"name": "r", "x": 1}
    assert read(center=untagged)[1] == ("center.x",)
    assert refusal(center={**untagged, "color": "red"}).param == "center.color"


@pytest.mark.parametrize(
    ("raw", "param", "says"),
    [
        (b"", None, "is empty"),
        (b" \r\n", None, "is empty"),
        (b"\xef\xbb\xbf", None, "is empty"),
        (b"{", None, "not valid JSON"),
        (b'{"center": {"kind": "rock", "name": "\xff"}}', None, "not valid JSON"),
        (b'{"things": "\xff"}', None, "not valid JSON"),
        (b"[]", None, "must be a JSON object"),
        (b"0x", None, "not valid JSON"),
        (b"null", None, "must be a JSON object"),
        (b'{"things": ' + b"[" * DEEP + b"]" * DEEP + b"}", None, "nested too deeply"),
        (b'{"mood": ' + b"[" * DEEP, None, "nested too deeply"),
        (b'{"things": [{"kind": "rock"}]}', "things[0].name", "is missing"),
    ],
)
def test_what_is_no_body_is_refused(raw: bytes, param: str | None, says: str) -> None:
    error = refusal(raw)
    assert (error.param, says in error.message) == (param, True), error.message


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (rb"a\ud83d", "a\ufffd"),
        (rb"\udc4da", "\ufffda"),
        (rb"\ud83d\ud83d\udc4d", "\ufffd\U0001f44d"),
        (rb"\\ud83d\ud83d", "\\ud83d\ufffd"),
    ],
)
def test_half_a_character_is_replaced_and_whole_ones_are_kept(written: bytes, name: str) -> None:
    garden, _ = read(b'{"center": {"kind": "rock", "name": "' + written + b'"}}')
    assert garden.center == Rock(name)


COUNTING = ["/v1/responses/input_tokens", "/v1/messages/count_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", *COUNTING])
async def test_a_body_has_sixteen_mebibytes_at_most(path: str) -> None:
    client = Client(ScriptedTokens())
    for num_bytes, status in ((16 << 20, 400), ((16 << 20) + 1, 413)):
        reply = await client.post(path, b"{}", {"content-length": str(num_bytes)})
        assert reply.status == status


class Cat(msgspec.Struct, tag_field="kind", tag="cat"):
    lives: Annotated[int, msgspec.Meta(ge=1, le=9)]
    toys: dict[str, int] = {}


class Dog(msgspec.Struct, tag_field="kind", tag="dog"):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=5)]


class Home(msgspec.Struct):
    pets: Annotated[list[Cat | Dog], msgspec.Meta(min_length=1, max_length=3)]
    size: Annotated[Literal["small", "large"] | None, msgspec.Meta(description="Of the home.")] = None
    rooms: dict[Annotated[str, msgspec.Meta(pattern="^[a-z]+$")], int] | None = None
    stop: str | list[str] | None = None
    owner: Cat | Dog | Literal["none"] | None = None


DOG = {"kind": "dog", "name": "Rex"}
NAME = "a string (length at least 1, length at most 5)"


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize(
    ("fields", "path", "why"),
    [
        ({"pets": [DOG, {"kind": "cat", "lives": 10}]}, "pets[1].lives", "integer (at least 1, at most 9)."),
        ({"pets": [{"kind": "cow"}]}, "pets[0].kind", "must be one of cat, dog."),
        ({"pets": [{"name": "Rex"}]}, "pets[0].kind", "is missing; it must be one of cat, dog."),
        ({"pets": [{"kind": "dog"}]}, "pets[0].name", f"is missing; it must be {NAME}."),
        ({"pets": [{"kind": "dog", "name": "Goofys"}]}, "pets[0].name", f"must be {NAME}."),
        ({"pets": {}}, "pets", "must be an array (length at least 1, length at most 3)."),
        ({"size": "huge"}, "size", "must be one of large, small."),
        ({"rooms": {"Hall": 1}}, "rooms", "Each key of `rooms` must be a string (pattern ^[a-z]+$)."),
        ({"rooms": {"hall": 1, "bath": 1.5}}, "rooms.bath", "must be an integer."),
        ({"pets": [{"kind": "cat", "toys": {"a": 1, "b": "x"}}]}, "pets[0].toys.b", "must be an integer."),
        ({"stop": [None]}, "stop[0]", "must be a string."),
        ({"stop": 1}, "stop", "must be a string or an array."),
        ({"owner": 1}, "owner", "must be one of none or an object."),
        ({"owner": {"kind": "cow"}}, "owner.kind", "must be one of cat, dog."),
    ],
)  # fmt: skip
def test_a_fault_is_named_by_its_path_and_what_is_allowed(
    fields: Any, path: str, why: str, is_part: bool
) -> None:
    value = {"pets": [DOG], **fields}
    with pytest.raises(InvalidRequest) as error:
        convert(value, Home, "input[2]") if is_part else decode(json.dumps(value).encode(), Home)
    path = f"input[2].{path}" if is_part else path
    assert error.value.param == path
    assert why.replace("`rooms`", f"`{path}`") in error.value.message
    assert f"`{path}`" in error.value.message


@pytest.mark.parametrize("later", [b"5", b"[]", b"{}", b"null"])
def test_a_fault_in_the_first_of_two_fields_with_one_name_is_refused(later: bytes) -> None:
    for first in (b'"rooms": {"hall": 1.5}, "rooms": ', b'"pets": [{"kind": "dog", "name": 1}], "pets": '):
        with pytest.raises(InvalidRequest, match="must be a"):
            decode(b"{" + first + later + b"}", Home)


NAMES = st.sampled_from(["role", "content", "type", "text", "function", "name", "tools", "mode", "1"])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-9, 2**33)
    | st.floats(-3, 3)
    | st.sampled_from(["", "user", "low", "text", "auto"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)


def _place(value: Any, param: str) -> None:
    """Fails unless a path leads to a place in the value, or to a field that an object in it lacks."""
    *steps, last = param.replace("[", ".[").split(".")
    for step in steps:
        value = value[int(step[1:-1])] if step.startswith("[") else value[step]
    assert isinstance(value, dict | list)
    if last.startswith("["):
        value[int(last[1:-1])]


@pytest.mark.parametrize("body", [ChatBody, ResponseBody])
@given(data=st.data())
def test_a_fault_of_any_body_is_at_a_place_in_it(body: type[msgspec.Struct], data: st.DataObject) -> None:
    fields = data.draw(st.dictionaries(st.sampled_from(body.__struct_encode_fields__), VALUES, max_size=3))
    value = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    try:
        decode(msgspec.json.encode(value), body)
    except InvalidRequest as error:
        _place(value, error.param or "")
