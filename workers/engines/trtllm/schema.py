"""Adapts the installed build's settings classes (pydantic models) to the settings loader."""

import functools
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from workers.settings import InvalidField, Schema

_PLAIN = {int, float, bool, str, type(None)}


class ModelSchema:
    """A pydantic model, read through `model_fields`: settings that this build lacks are unknown.

    The root is left as a dict: LLM() builds it.
    """

    def __init__(self, model: Any, *, is_root: bool = False) -> None:
        self._model = model
        self._is_root = is_root

    @functools.cached_property
    def _fields(self) -> dict[str, Schema | None]:
        nested = {name: _nested(field) for name, field in self._model.model_fields.items()}
        return {name: ModelSchema(cls) if cls is not None else None for name, cls in nested.items()}

    def fields(self) -> Mapping[str, Schema | None]:
        """See `Schema`."""
        return self._fields

    def nullable(self, name: str) -> bool:
        """See `Schema`."""
        return type(None) in get_args(self._model.model_fields[name].annotation)

    def convert(self, name: str, value: object) -> object:
        """Check plain numbers, switches and text; give a closed list's word the build's letter case (`ucx`,
        `UCX`). All else passes unchanged: the build's checks know more than its annotations.
        """
        annotation = self._model.model_fields[name].annotation
        if set(get_args(annotation) or (annotation,)) <= _PLAIN:
            return msgspec.convert(value, annotation)
        words = list(_words(annotation))
        if not isinstance(value, str) or value in words:
            return value
        return next((word for word in words if word.lower() == value.lower()), value)

    def lacks(self, name: str, word: str) -> bool:
        """Whether the field has a closed list of words, and `word` is not in it, in any letter case."""
        words = {known.lower() for known in _words(self._model.model_fields[name].annotation)}
        return bool(words) and word.lower() not in words

    def default(self, name: str) -> object:
        """See `Schema`."""
        field = self._model.model_fields[name]
        if field.is_required():
            return None
        default = field.get_default(call_default_factory=True)
        return getattr(default, "value", default)

    def build(self, values: dict[str, object]) -> Any:
        """See `Schema`."""
        if self._is_root:
            return values
        try:
            return self._model(**values)
        except ValueError as error:
            raise first_invalid(error) from error
        except TypeError as error:  # null crashes a validator of the build
            raise ValueError(f"TensorRT-LLM refuses the settings: {error}") from error


def lacks(schema: Schema | None, path: str, word: str) -> bool:
    """Whether this build has a closed list of words for the setting at `path`, and `word` is not in it."""
    name, _, rest = path.partition(".")
    if schema is None or name not in schema.fields():
        return False
    if rest:
        return lacks(schema.fields()[name], rest, word)
    return isinstance(schema, ModelSchema) and schema.lacks(name, word)


def first_invalid(error: ValueError) -> ValueError:
    """The first finding of a pydantic ValidationError, on one line, as an InvalidField if it names a field.
    Other errors are returned unchanged.
    """
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return error
    finding = errors()[0]
    path, message = ".".join(str(part) for part in finding["loc"]), " ".join(finding["msg"].split())
    return InvalidField(path, f"{finding['input']!r}: {message}") if path else ValueError(message)


def _nested(field: Any) -> Any:
    """The model that the field holds: the only one, or a union's default (`cuda_graph_config`: the other one
    is for encoders). A union without a default stays a leaf, since the choice is unknown.
    """
    kinds = list(_alternatives(field.annotation))
    if not all(hasattr(kind, "model_fields") for kind in kinds):
        return None
    default = type(field.get_default(call_default_factory=True))
    return kinds[0] if len(kinds) == 1 else default if default in kinds else None


def _alternatives(annotation: Any) -> Iterator[Any]:
    """The annotation's types except None."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for part in get_args(annotation):
            yield from _alternatives(part)
    elif annotation is not type(None):
        yield annotation


def _words(annotation: Any) -> Iterator[str]:
    if get_origin(annotation) is Literal:
        yield from (word for word in get_args(annotation) if isinstance(word, str))
        return
    for part in get_args(annotation):
        yield from _words(part)
