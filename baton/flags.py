"""Command-line flags from frozen dataclasses: one flag per field, each value with its source."""

import argparse
import dataclasses
import functools
import importlib.metadata
import os
import re
import sys
import types
from collections.abc import Mapping, Sequence
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
    at_least: float = -MOST,
    above: float | None = None,
    at_most: float = MOST,
) -> Any:
    """A dataclass field that is also a flag. `env` names the environment variables used if the flag is
    missing; the first one that is set wins. Numbers are finite, and within the limits.
    """
    names = (env,) if isinstance(env, str) else env
    limits = at_least, above, at_most
    metadata = {"text": text, "env": names, "metavar": metavar, "alias": alias, "limits": limits}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Parsed(Generic[T]):
    """The settings and their sources: `flag`, `default`, or the name of an environment variable."""

    settings: T
    sources: dict[str, str]

    def typed(self, name: str) -> bool:
        """Whether the user gave this flag on the command line."""
        return self.sources[name] == "flag"

    def lines(self) -> list[str]:
        """`name=value (source)` for each setting, to print at start."""
        values = _flatten(self.settings)
        return [without_secrets(f"{name}={values[name]} ({source})") for name, source in self.sources.items()]


def without_secrets(text: str) -> str:
    """Mask secrets for a log: credentials in URLs and Hugging Face access tokens."""
    return _SECRETS.sub("***", text)


def parse(
    cls: type[T], argv: Sequence[str], *, prog: str, description: str, environ: Mapping[str, str] = os.environ
) -> Parsed[T]:
    """Read `argv`, then `environ`, then defaults into `cls`, a dataclass of `flag` fields.

    A field whose type is such a dataclass is a group of flags. On bad input the process exits with status 2
    and one line.
    """
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
    return f"baton {importlib.metadata.version('baton')}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def read(cls: type[T], argv: Sequence[str]) -> Parsed[T]:
    """What another process would make of this command line, its environment left out. Raises ValueError."""
    return _read(_Parser(add_help=False, allow_abbrev=False), cls, argv, {})


def _read(
    parser: argparse.ArgumentParser, cls: type[T], argv: Sequence[str], environ: Mapping[str, str]
) -> Parsed[T]:
    for field, kind in _leaves(cls):
        _add_flag(parser, field, kind)
    sources: dict[str, str] = {}
    return Parsed(_build(cls, vars(parser.parse_args(argv)), environ, sources), sources)


def _leaves(cls: type) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = get_type_hints(cls)
    found: list[tuple[dataclasses.Field[Any], Any]] = []
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            found += _leaves(kind)  # type: ignore[arg-type]  # is_dataclass does not narrow to a type
        else:
            found.append((field, kind))
    return found


def _add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field[Any], kind: Any) -> None:
    names = ["--" + field.name.replace("_", "-")]
    if field.metadata["alias"]:
        names.append(field.metadata["alias"])
    text = field.metadata["text"]
    if field.default not in (None, "", False):
        text += f" [{field.default}]"
    if field.metadata["env"]:
        text += f" (env {', '.join(field.metadata['env'])})"
    if kind is bool:
        parser.add_argument(*names, action="store_true", default=argparse.SUPPRESS, help=text)
        return
    plain = _plain(kind)
    parser.add_argument(
        *names,
        type=functools.partial(_word, get_args(plain)) if get_origin(plain) is Literal else plain,
        choices=get_args(plain) if get_origin(plain) is Literal else None,
        metavar=field.metadata["metavar"],
        default=argparse.SUPPRESS,
        help=text.replace("%", "%%"),
    )


def _word(words: tuple[str, ...], text: str) -> str:
    """The one of `words` that is `text` in another letter case, else `text`."""
    return next((word for word in words if word.lower() == text.lower()), text)


def _plain(kind: Any) -> Any:
    """The `X` of `X | None`."""
    if get_origin(kind) in (Union, types.UnionType):
        return next(arg for arg in get_args(kind) if arg is not type(None))
    return kind


def _build(cls: type[T], given: Mapping[str, Any], environ: Mapping[str, str], sources: dict[str, str]) -> T:
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # T is a dataclass by contract
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            values[field.name] = _build(kind, given, environ, sources)  # type: ignore[arg-type]  # a dataclass, as asked above
            continue
        env = next((name for name in field.metadata["env"] if environ.get(name)), None)
        if field.name in given:
            values[field.name], sources[field.name] = given[field.name], "flag"
            _check_limits(f"--{field.name.replace('_', '-')} ", values[field.name], field)
        elif env is not None:
            values[field.name], sources[field.name] = _from_env(env, environ[env], kind), env
            _check_limits(f"{env}=", values[field.name], field)
        else:
            values[field.name], sources[field.name] = field.default, "default"
    return cls(**values)


def _check_limits(named: str, value: object, field: dataclasses.Field[Any]) -> None:
    """Raise ValueError if a number is not finite, or not within the limits of its flag."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    at_least, above, at_most = field.metadata["limits"]
    if not -MOST <= value <= MOST:
        raise ValueError(f"{named}{value}: must be a finite number of at most {MOST:g}")
    if (above is not None and value <= above) or not at_least <= value <= at_most:
        low = f"above {above:g}" if above is not None else f"at least {at_least:g}"
        high = f" and at most {at_most:g}" if at_most < MOST else ""
        raise ValueError(f"{named}{value:g}: must be {low}{high}")


def _from_env(env: str, text: str, kind: Any) -> Any:
    plain = _plain(kind)
    if get_origin(plain) is Literal:
        text = _word(get_args(plain), text)
        if text in get_args(plain):
            return text
        raise ValueError(f"{env}={text}: allowed are {', '.join(get_args(plain))}")
    if plain is bool:
        return text.lower() in ("1", "true", "yes", "on")
    try:
        return plain(text)
    except ValueError:
        raise ValueError(f"{env}={text}: not a valid {plain.__name__}") from None


def _flatten(settings: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        values |= _flatten(value) if dataclasses.is_dataclass(value) else {field.name: value}
    return values
