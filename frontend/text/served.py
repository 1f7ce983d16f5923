"""A served model, the error for prompts that exceed its context, and the tokenizers of registered models."""

import asyncio
import logging
from collections.abc import Iterable
from pathlib import Path

import msgspec

from baton.errors import BatonError, NoWorkers
from baton.messages import WorkerInfo
from frontend.text.tokenizer import ModelTokenizer

log = logging.getLogger(__name__)

COUNTED_CONTEXTS = 2
"""A prompt of more than this many contexts is refused before the rest of it is tokenised."""


class ServedModel(msgspec.Struct, frozen=True):
    """A model and its tokenizer. `context_length` is the smallest among its workers, in tokens, for prompt
    and answer together; prompts name the `current_date`, YYYY-MM-DD."""

    name: str
    context_length: int
    tokenizer: ModelTokenizer
    current_date: str

    @property
    def max_counted_tokens(self) -> int:
        """A longer prompt is refused with `too_long`."""
        return COUNTED_CONTEXTS * self.context_length

    def too_long(self, path: str) -> "ContextTooLong":
        """The error for a prompt or tokens in the field `path` with more than `max_counted_tokens`."""
        return ContextTooLong(
            f"This model's maximum context length is {self.context_length} tokens, but `{path}` "
            f"has more than {self.max_counted_tokens} tokens. Shorten it.",
            param=path,
        )


class ContextTooLong(BatonError):
    """The prompt fills the model's context."""

    code = "context_length_exceeded"
    status = 400


RETRY_S = 1.0


class Tokenizers:
    """Loads tokenizers in threads. If one cannot be loaded, it tries again while a worker of the model is
    registered.
    """

    def __init__(self, model_path: Path | None) -> None:
        """`model_path` is read instead of the workers' paths."""
        self.loaded: dict[str, ModelTokenizer] = {}
        self._model_path = model_path
        self._folders: dict[str, dict[Path, None]] = {}  # in order, each once
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._tried: dict[str, asyncio.Event] = {}  # once, by models that are loading

    def load(self, workers: Iterable[WorkerInfo]) -> None:
        """Begin to load what these workers need, which are all that are registered."""
        self._folders = {}
        for worker in workers:
            folder = self._model_path or Path(worker.model_path)
            self._folders.setdefault(worker.model, {})[folder] = None
        for model in self._folders.keys() - self.loaded.keys() - self._loading.keys():
            self._tried[model] = asyncio.Event()
            self._loading[model] = asyncio.create_task(self._load(model, self._tried[model]))

    async def tried(self) -> None:
        """Return when every tokenizer that is needed is loaded, or could not be loaded once."""
        for tried in list(self._tried.values()):
            await tried.wait()

    def of(self, model: str) -> ModelTokenizer:
        """The model's tokenizer. Raises NoWorkers while it is not loaded."""
        if (tokenizer := self.loaded.get(model)) is not None:
            return tokenizer
        raise NoWorkers(f"The tokenizer of {model!r} is not loaded yet; retry later.", retry_after_s=1)

    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._loading.values())

    async def _load(self, model: str, tried: asyncio.Event) -> None:
        """Try the model's folders until one has its tokenizer. Logs each failure once, not at each retry."""
        failures: set[str] = set()
        try:
            while model in self._folders:
                for folder in self._folders[model]:
                    try:
                        self.loaded[model] = await asyncio.to_thread(ModelTokenizer.load, folder)
                    except (OSError, ValueError) as error:
                        if (failure := f"folder={folder} error={error}") not in failures:
                            failures.add(failure)
                            log.warning("no tokenizer yet model=%s %s", model, failure)
                    else:
                        log.info("tokenizer model=%s folder=%s", model, folder)
                        return
                tried.set()
                await asyncio.sleep(RETRY_S)  # a folder does not notify
        finally:
            tried.set()
            del self._loading[model], self._tried[model]
