"""Why a value does not fit: named by its whole path, in JSON's words, with what is allowed."""

import json
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from frontend.chat.request import ChatBody
from frontend.http.body import convert, decode
from frontend.responses.body import ResponseBody


class Cat(msgspec.Struct, tag_field="kind", tag="cat"):
    lives: Annotated[int, msgspec.Meta(ge=1, le=9)]


class Dog(msgspec.Struct, tag_field="kind", tag="dog"):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=5)]


class Home(msgspec.Struct):
    pets: Annotated[list[Cat | Dog], msgspec.Meta(min_length=1, max_length=3)]
    size: Literal["small", "large"] | None = None
    rooms: dict[Annotated[str, msgspec.Meta(pattern="^[a-z]+$")], int] | None = None
    stop: str | list[str] | None = None
    owner: Cat | Dog | Literal["none"] | None = None


DOG = {"kind": "dog", "name": "Rex"}


@pytest.mark.parametrize("is_part", [False, True])
@pytest.mark.parametrize(
    ("fields", "path", "why"),
    [
        ({"pets": [DOG, {"kind": "cat", "lives": 10}]}, "pets[1].lives", "`integer` <= 9"),
        ({"pets": [{"kind": "cow"}]}, "pets[0].kind", "must be one of cat, dog."),
        ({"pets": [{"name": "Rex"}]}, "pets[0].kind", "is missing; allowed values: cat, dog."),
        ({"pets": [{"kind": "dog"}]}, "pets[0].name", "is missing."),
        ({"pets": [{"kind": "dog", "name": "Goofys"}]}, "pets[0].name", "`string` of length <= 5"),
        ({"pets": {}}, "pets", "`array`, got `object`"),
        ({"size": "huge"}, "size", "must be one of large, small."),
        ({"rooms": {"Hall": 1}}, "rooms", "'^[a-z]+$'"),
        ({"rooms": {"hall": 1, "bath": 1.5}}, "rooms.bath", "`integer`, got `number`"),
        ({"stop": [None]}, "stop[0]", "`string`, got `null`"),
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
    assert error.value.message.startswith(f"`{path}`")
    assert why in error.value.message


def test_what_fits_has_no_fault() -> None:
    fields = {"size": None, "rooms": {"hall": 2}, "stop": ["a"], "owner": DOG}
    assert decode(json.dumps({"pets": [DOG], **fields}).encode(), Home)[0].owner == Dog("Rex")


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
