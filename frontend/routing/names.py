"""Resolves model names: full names, the operator's aliases, and names that clients have shortened."""

import fnmatch
from collections.abc import Collection, Iterator, Sequence

Alias = tuple[str, str]
"""(name pattern such as `claude-*`, model)."""


def parse_aliases(text: str) -> tuple[Alias, ...]:
    """Parses comma-separated `PATTERN=MODEL` pairs. Raises ValueError."""
    aliases = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        pattern, _, model = part.partition("=")
        if not pattern or not model:
            raise ValueError(
                f"--model-alias {part!r}: must be PATTERN=MODEL, such as claude-*=openai/gpt-oss-120b"
            )
        aliases.append((pattern, model))
    return tuple(aliases)


def model_of(asked: str, models: Collection[str], aliases: Sequence[Alias]) -> str | None:
    """The model that `asked` refers to, or None: by name, by the first matching alias, or by the part of its
    name after the last slash or before the first, if that is unambiguous."""
    if asked in models:
        return asked
    meant = [model for pattern, model in aliases if fnmatch.fnmatchcase(asked, pattern)]
    if meant:
        return meant[0] if meant[0] in models else None
    by_end = [model for model in models if model.endswith(f"/{asked}")]
    by_start = [model for model in models if model.startswith(f"{asked}/")]
    return next((named[0] for named in (by_end, by_start) if len(named) == 1), None)


def other_names(models: Collection[str], aliases: Sequence[Alias]) -> Iterator[str]:
    """The aliases without wildcards of available models, for /v1/models."""
    yield from (name for name, model in aliases if model in models and not set(name) & set("*?["))
