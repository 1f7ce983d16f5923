"""The names of a model: its own, those that the operator gives it, and the parts that clients leave of it."""

import fnmatch
from collections.abc import Collection, Iterator, Sequence

Alias = tuple[str, str]
"""(pattern of names, as `claude-*`; the model that is meant)."""


def parse_aliases(text: str) -> tuple[Alias, ...]:
    """`PATTERN=MODEL`, several separated by commas. Raises ValueError for anything else."""
    aliases = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        pattern, _, model = part.partition("=")
        if not pattern or not model:
            raise ValueError(f"{part!r}: write PATTERN=MODEL, as claude-*=openai/gpt-oss-120b")
        aliases.append((pattern, model))
    return tuple(aliases)


def model_of(asked: str, models: Collection[str], aliases: Sequence[Alias]) -> str | None:
    """The one of `models` that is meant: by its name, by an alias (the first that fits), or by the part of
    its name after the last slash or before the first, where just one model has it. None if there is none."""
    if asked in models:
        return asked
    meant = [model for pattern, model in aliases if fnmatch.fnmatchcase(asked, pattern)]
    if meant:
        return meant[0] if meant[0] in models else None
    by_end = [model for model in models if model.endswith(f"/{asked}")]
    by_start = [model for model in models if model.startswith(f"{asked}/")]
    return next((named[0] for named in (by_end, by_start) if len(named) == 1), None)


def other_names(models: Collection[str], aliases: Sequence[Alias]) -> Iterator[str]:
    """The aliases that are whole names of a served model, for lists of models."""
    yield from (name for name, model in aliases if model in models and not set(name) & set("*?["))
