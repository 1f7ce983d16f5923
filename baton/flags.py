"""Command-line flags from frozen dataclasses: one flag per field, each value with its source."""

import argparse
import dataclasses
import functools
import importlib.metadata
import os
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
MOST = 1e15
"""No number of a flag is larger."""
_SECRETS = re.compile(r"(?<=://)[^/\s,]+(?=@)|\bhf_[A-Za-z0-9]{20,}")
_ONE_LINE_EACH = functools.partial(argparse.HelpFormatter, max_help_position=38, width=120)


def flag(
    default: object,
    text: str,
    *,
    env: str | tuple[str, ...] = (),
    metavar: str | None = None,
    alias: str | None = None,
    is_positional: bool = False,
    at_least: float = -MOST,
    above: float | None = None,
    at_most: float = MOST,
) -> Any:
    """A dataclass field that is also a flag. `env` names the environment variables used if the flag is
    missing; the first one that is set wins. Numbers are finite, and within the limits. A positional one is
    given without its name; it may be missing."""
    names = (env,) if isinstance(env, str) else env
    limits = at_least, above, at_most
    metadata = {"text": text, "env": names, "metavar": metavar, "alias": alias, "limits": limits}
    return dataclasses.field(default=default, metadata=metadata | {"is_positional": is_positional})


@dataclasses.dataclass(frozen=True)
class Parsed(Generic[T]):
    """The settings and their sources: `flag`, `default`, or the name of an environment variable."""

    settings: T
    sources: dict[str, str]

    def typed(self, name: str) -> bool:
        """Whether the user gave this flag on the command line."""
        return self.sources[name] == "flag"

    def lines(self) -> list[str]:
        """`name=value (source)` for each setting that is not the default, to print at start."""
        values = dataclasses.asdict(self.settings)  # type: ignore[call-overload]  # T is a dataclass by contract
        for group in [value for value in values.values() if isinstance(value, dict)]:
            values |= group
        set_ = {name: source for name, source in self.sources.items() if source != "default"}
        return [without_secrets(f"{name}={values[name]} ({source})") for name, source in set_.items()]


def without_secrets(text: str) -> str:
    """Mask secrets for a log: credentials in URLs and Hugging Face access tokens."""
    return _SECRETS.sub("***", text)


def parse(
    cls: type[T], argv: Sequence[str], *, prog: str, description: str, environ: Mapping[str, str] = os.environ
) -> Parsed[T]:
    """Read `argv`, then `environ`, then defaults into `cls`, a dataclass of `flag` fields.

    A field whose type is such a dataclass is a group of flags. On bad input the process exits with status 2
    and one line."""
    try:
        parser = _Parser(
            prog=prog,
            usage="%(prog)s [options]",
            description=description,
            allow_abbrev=False,
            formatter_class=_ONE_LINE_EACH,
        )
        parser.add_argument("--version", action="version", version=version())
        return _read(parser, cls, argv, environ)
    except ValueError as error:
        hint = f"; {prog} --help lists the flags" if str(error).startswith("unrecognized") else ""
        sys.stderr.write(f"error: {error}{hint}\n")
        raise SystemExit(2) from None


def version() -> str:
    """`baton` and the version of its package."""
    try:
        return f"baton {importlib.metadata.version('baton')}"
    except importlib.metadata.PackageNotFoundError:
        return "baton, not installed"  # run from its folder


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def read(cls: type[T], argv: Sequence[str]) -> Parsed[T]:
    """What another process would make of this command line, its environment left out. Raises ValueError."""
    return _read(_Parser(add_help=False, allow_abbrev=False), cls, argv, {})


def _read(
    parser: argparse.ArgumentParser, cls: type[T], argv: Sequence[str], environ: Mapping[str, str]
) -> Parsed[T]:
    flags = list(_leaves(cls))
    for field, kind in flags:
        _add_flag(parser, field, kind)
    typed = vars(parser.parse_args(argv))
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for field, kind in flags:
        name = field.name
        env = next((each for each in field.metadata["env"] if environ.get(each)), None)
        if name in typed:
            values[name], sources[name] = typed[name], "flag"
            _check_limits(f"{_option(field)} ", values[name], field)
        elif env is not None:
            text, sources[name] = environ[env], env
            if kind is bool:
                values[name] = text.lower() in ("1", "true", "yes", "on")
                continue
            try:
                values[name] = getattr(parser.parse_args([f"{_option(field)}={text}"]), name)
            except ValueError as error:
                raise ValueError(f"{env}={text}, as {error}") from None
            _check_limits(f"{env}=", values[name], field)
        else:
            values[name], sources[name] = field.default, "default"
    return Parsed(_build(cls, values), sources)


def _leaves(cls: type) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """Each flag with its type, `X` for `X | None`; those of a group in its place."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from _leaves(kind)  # type: ignore[arg-type]  # is_dataclass does not narrow to a type
        elif get_origin(kind) in (Union, types.UnionType):
            yield field, next(arg for arg in get_args(kind) if arg is not type(None))
        else:
            yield field, kind


def _option(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def _add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], kind: Any) -> None:
    given = field.metadata
    names = [name for name in (_option(field), given["alias"]) if name]
    text = given["text"]
    if field.default not in (None, "", False):
        text += f" [{field.default}]"
    if given["env"]:
        text += f" (env {', '.join(given['env'])})"
    words = get_args(kind) if get_origin(kind) is Literal else None
    options: dict[str, Any] = {"action": "store_true"}
    if kind is not bool:
        word = functools.partial(_word, words) if words else kind
        options = {"type": word, "choices": words, "metavar": given["metavar"]}
    if given["is_positional"]:
        names, options["nargs"] = [field.name], "?"
    parser.add_argument(*names, default=argparse.SUPPRESS, help=text.replace("%", "%%"), **options)


def _word(words: tuple[str, ...], text: str) -> str:
    """The one of `words` that is `text` in another letter case, else `text`."""
    return next((word for word in words if word.lower() == text.lower()), text)


def _check_limits(named: str, value: object, field: dataclasses.Field[Any]) -> None:
    """Raise ValueError if a number is not finite, or not within the limits of its flag."""
    if not isinstance(value, int | float):
        return
    at_least, above, at_most = field.metadata["limits"]
    if not -MOST <= value <= MOST:
        raise ValueError(f"{named}{value}: must be a finite number of at most {MOST:g}")
    if (above is not None and value <= above) or not at_least <= value <= at_most:
        low = f"above {above:g}" if above is not None else f"at least {at_least:g}"
        high = f" and at most {at_most:g}" if at_most < MOST else ""
        raise ValueError(f"{named}{value:g}: must be {low}{high}")


def _build(cls: type[T], values: Mapping[str, Any]) -> T:
    hints = get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]  # T is a dataclass by contract
    return cls(**{name: values[name] if name in values else _build(hints[name], values) for name in names})
