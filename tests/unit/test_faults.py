"""Why a value does not fit: named by its whole path, in JSON's words, with what is allowed."""

from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.chat.body import ChatBody
from frontend.http.body import Fault, first_fault, type_of
from frontend.responses.body import ResponseBody


class Cat(msgspec.Struct, tag_field="kind", tag="cat"):
    lives: Annotated[int, msgspec.Meta(ge=1, le=9)]


class Dog(msgspec.Struct, tag_field="kind", tag="dog"):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=5)]


class Home(msgspec.Struct):
    pets: Annotated[list[Cat | Dog], msgspec.Meta(min_length=1, max_length=3)]
    size: Literal["small", "large"] | None = None
    rent: Annotated[float, msgspec.Meta(gt=0, le=10)] | None = None
    rooms: dict[Annotated[str, msgspec.Meta(pattern="^[a-z]+$")], int] | None = None
    stop: str | list[str] | None = None
    is_let: bool | None = None
    code: Annotated[str, msgspec.Meta(min_length=2)] | None = None
    tags: Annotated[dict[str, int], msgspec.Meta(max_length=1)] | None = None
    keys: Annotated[list[str], msgspec.Meta(min_length=2)] | None = None
    floors: Annotated[int, msgspec.Meta(ge=1, le=9)] | list[int] | None = None


DOG = {"kind": "dog", "name": "Rex"}


def fault(**fields: Any) -> Fault | None:
    return first_fault({"pets": [DOG], **fields}, type_of(Home))


@pytest.mark.parametrize(
    ("fields", "path", "why"),
    [
        ({"pets": [DOG, {"kind": "cat", "lives": 10}]}, "pets[1].lives", "must be between 1 and 9"),
        ({"pets": [{"kind": "cow"}]}, "pets[0].kind", "must be one of cat, dog, not 'cow'"),
        ({"pets": [{"name": "Rex"}]}, "pets[0].kind", "is missing; allowed values: cat, dog"),
        ({"pets": [{"kind": "dog"}]}, "pets[0].name", "is missing"),
        ({"pets": [{"kind": "dog", "name": ""}]}, "pets[0].name", "must not be empty"),
        ({"pets": [{"kind": "dog", "name": "Goofys"}]}, "pets[0].name", "has 6 characters; at most 5 are allowed"),  # noqa: E501  one case, one line
        ({"pets": []}, "pets", "must have at least 1 entry"),
        ({"pets": [DOG] * 4}, "pets", "has 4 entries; at most 3 are allowed"),
        ({"pets": {}}, "pets", "must be an array, not an object"),
        ({"size": "huge"}, "size", "must be one of large, small, not 'huge'"),
        ({"size": True}, "size", "must be one of large, small, not true"),
        ({"rent": 0}, "rent", "must be greater than 0 and at most 10"),
        ({"rent": "dear"}, "rent", "must be a number, not 'dear'"),
        ({"rooms": {"Hall": 1}}, "rooms", "key 'Hall' must match the pattern ^[a-z]+$"),
        ({"rooms": {"H" * 50: 1}}, "rooms", f"key '{'H' * 40}' must match the pattern ^[a-z]+$"),
        ({"tags": {"a": 1, "b": 2}}, "tags", "has 2 entries; at most 1 are allowed"),
        ({"size": "x" * 41}, "size", "must be one of large, small, not a string of 41 characters"),
        ({"rooms": {"hall": 1.5}}, "rooms.hall", "must be an integer, not 1.5"),
        ({"stop": 5}, "stop", "must be a string or an array, not 5"),
        ({"stop": [None]}, "stop[0]", "must be a string, not null"),
        ({"is_let": 1}, "is_let", "must be true or false, not 1"),
        ({"code": "a"}, "code", "must have at least 2 characters"),
        ({"keys": ["a"]}, "keys", "must have at least 2 entries"),
        ({"floors": 0}, "floors", "must be between 1 and 9"),
        ({"floors": "two"}, "floors", "must be an integer or an array, not 'two'"),
        ({"floors": True}, "floors", "must be an integer or an array, not true"),
    ],
)  # fmt: skip
def test_a_fault_is_told_by_its_path_and_what_is_allowed(fields: Any, path: str, why: str) -> None:
    assert fault(**fields) == Fault(path, why)


def test_what_fits_has_no_fault() -> None:
    assert fault(size=None, rent=2, rooms={"hall": 2}, stop=["a"], is_let=False) is None


def test_the_value_itself_may_be_at_fault() -> None:
    assert first_fault([], type_of(Home)) == Fault("", "must be an object, not an array")


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


@pytest.mark.parametrize("body", [ChatBody, ResponseBody])
@given(data=st.data())
def test_there_is_a_fault_just_where_decoding_fails(body: type[msgspec.Struct], data: st.DataObject) -> None:
    fields = data.draw(st.dictionaries(st.sampled_from(body.__struct_encode_fields__), VALUES, max_size=3))
    value = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    raw = msgspec.json.encode(value)
    try:
        msgspec.json.decode(raw, type=body)
        fits = True
    except msgspec.ValidationError:
        fits = False

    found = first_fault(msgspec.json.decode(raw), type_of(body))

    assert (found is None) is fits
