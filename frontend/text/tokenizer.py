"""Models' tokenizers, and served models; the only file that imports `tokenizers`."""

import asyncio
import enum
import logging
import re
import threading
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TypeAlias

import msgspec
from tokenizers import Tokenizer

from baton.errors import BatonError, InvalidRequest
from baton.messages import UNDECODABLE, WorkerInfo

log = logging.getLogger(__name__)


class SpecialToken(enum.Enum):
    """A control token; the value is its literal text in `tokenizer.json`."""

    STARTOFTEXT = "<|startoftext|>"
    ENDOFTEXT = "<|endoftext|>"
    START = "<|start|>"
    CHANNEL = "<|channel|>"
    CONSTRAIN = "<|constrain|>"
    MESSAGE = "<|message|>"
    END = "<|end|>"
    CALL = "<|call|>"
    RETURN = "<|return|>"

    __hash__ = object.__hash__  # Enum's own is written in Python


Segment: TypeAlias = "str | SpecialToken | array[int]"
"""Plain text, even if it spells a control token; one control token; or tokens as the model wrote them."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """`token_bytes[id]` is the text of a token as UTF-8 bytes, which may be part of a character; b"" for
    control tokens and unused ids."""

    special_ids: Mapping[SpecialToken, int]
    token_bytes: Sequence[bytes]


PIECE_CHARS = 1 << 15

_CACHE_BYTES = 64 << 20
_UNSURE_TOKENS = 32
"""At the end of a text that goes on: they may depend on the rest."""
_MOST_CUTS = 16
_REQUIRED = frozenset(SpecialToken) - {SpecialToken.STARTOFTEXT}
_STOPS = (SpecialToken.RETURN, SpecialToken.CALL, SpecialToken.ENDOFTEXT)


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class TooManyTokens(Exception):
    """The text has more tokens than the limit; the rest was not tokenised."""


class _Config(msgspec.Struct):
    vocab_size: int = 0


class ModelTokenizer:
    """Byte-level BPE with Harmony's control tokens. Thread-safe.

    The added tokens are removed from the `tokenizers` object, so that text cannot inject control tokens: they
    enter a prompt only as `SpecialToken` segments, or through `encode_text` with `allow_special`."""

    def __init__(self, ordinary: Tokenizer, added: dict[str, int]) -> None:
        self._ordinary = ordinary
        self._added = added
        longest_first = sorted(added, key=len, reverse=True)
        self._added_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._kept: dict[str, array[int]] = {}  # the turns of a conversation recur
        self._num_kept_bytes = 0
        self._lock = threading.Lock()
        self.special_ids = {token: added[token.value] for token in SpecialToken if token.value in added}
        missing = sorted(token.value for token in _REQUIRED - self.special_ids.keys())
        if missing:
            raise ValueError(f"the vocabulary has no {', '.join(missing)}")
        self._spelled = {token_id: token.value.encode() for token, token_id in self.special_ids.items()}
        self.stop_token_ids = tuple(self.special_ids[token] for token in _STOPS)
        table = _byte_table(ordinary.get_vocab(with_added_tokens=False), frozenset(added.values()))
        self.vocabulary = Vocabulary(special_ids=self.special_ids, token_bytes=table)
        self.vocab_size = len(self.vocabulary.token_bytes)
        self.num_token_ids = self.vocab_size
        """With those that the model has beyond its vocabulary, if its config.json says so."""
        for name, token_id in added.items():
            if token_id in self._encode(name):
                raise ValueError(f"the tokenizer encodes the plain text {name} as a control token")

    @classmethod
    def load(cls, folder: Path) -> "ModelTokenizer":
        """Loads `tokenizer.json` from a model's folder. Blocks for about a second for gpt-oss.

        Raises OSError if it cannot be read, ValueError if it is not a byte-level BPE tokenizer with Harmony's
        control tokens."""
        path = folder / "tokenizer.json"
        try:
            parts = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
            added = msgspec.json.decode(parts["added_tokens"], type=list[_AddedToken])
        except (*UNDECODABLE, KeyError) as error:
            raise ValueError(f"{path} is not a file of the `tokenizers` library: {error}") from error
        parts["added_tokens"] = msgspec.Raw(b"[]")
        try:
            ordinary = Tokenizer.from_str(msgspec.json.encode(parts).decode())
            tokenizer = cls(ordinary, {token.content: token.id for token in added})
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path}: {error}") from error
        with suppress(OSError, *UNDECODABLE):  # there is none
            config = msgspec.json.decode((folder / "config.json").read_bytes(), type=_Config)
            tokenizer.num_token_ids = max(tokenizer.vocab_size, config.vocab_size)
        return tokenizer

    def encode_segments(self, segments: Iterable[Segment], limit: int) -> tuple[list[int], int]:
        """The tokens of a rendered prompt, and how many are before the first answer. Raises TooManyTokens if
        there are more than `limit`."""
        token_ids: list[int] = []
        for segment in segments:
            match segment:  # without calls of `isinstance`
                case SpecialToken():
                    token_ids.append(self.special_ids[segment])
                    continue
                case str():
                    token_ids += self.encode_text_segment(segment, limit)
                case _:
                    token_ids += segment
            if len(token_ids) > limit:
                raise TooManyTokens
        answer = [self.special_ids[SpecialToken.START], *self.encode_text_segment("assistant")]
        num_opening = token_ids.index(answer[0])
        while token_ids[num_opening : num_opening + len(answer)] != answer:
            num_opening = token_ids.index(answer[0], num_opening + 1)
        return token_ids, num_opening

    def encode_text_segment(self, text: str, limit: int | None = None) -> Sequence[int]:
        """Token ids of a prompt's text; text that spells a control token stays plain text. Only a text of
        several pieces is compared with `limit`, see `encode_text`. Texts kept the longest make room for new
        ones."""
        if (kept := self._kept.get(text)) is not None:
            return kept
        ids = array("I", self._encode(text, limit))
        with self._lock:
            if text not in self._kept and _num_bytes(text, ids) <= _CACHE_BYTES // 8:
                self._kept[text] = ids
                self._num_kept_bytes += _num_bytes(text, ids)
            while self._num_kept_bytes > _CACHE_BYTES:
                oldest = next(iter(self._kept))
                self._num_kept_bytes -= _num_bytes(oldest, self._kept.pop(oldest))
        return ids

    def encode_text(self, text: str, *, allow_special: bool = False, limit: int | None = None) -> list[int]:
        """Token ids of raw text; `allow_special` encodes spelled-out control tokens as such. Raises
        TooManyTokens as soon as there are more than `limit`."""
        ids: list[int] = []
        for i, part in enumerate(self._added_pattern.split(text) if allow_special else [text]):
            ids += [self._added[part]] if i % 2 else self._encode(part, _rest(limit, ids))
        _rest(limit, ids)
        return ids

    def checked(self, token_ids: list[int], model: str, path: str) -> list[int]:
        """Returns the ids, which come from the field `path`. Raises InvalidRequest if one is out of range."""
        if (most := max(token_ids, default=0)) >= self.vocab_size:
            known = f"{model} has 0 to {self.vocab_size - 1}"
            raise InvalidRequest.at(path, f"contains the token id {most}; {known}.")
        return token_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The token's text as bytes; b"" for control tokens and unknown ids."""
        table = self.vocabulary.token_bytes
        return table[token_id] if 0 <= token_id < len(table) else b""

    def bytes_of(self, token_ids: Iterable[int], *, shows_special: bool = False) -> bytes:
        """The text of the tokens as bytes; `shows_special` spells out control tokens."""
        spelled = self._spelled if shows_special else {}
        return b"".join([spelled.get(token_id) or self.token_bytes(token_id) for token_id in token_ids])

    def decode(self, token_ids: Iterable[int], *, shows_special: bool = False) -> str:
        """`bytes_of` as text; invalid UTF-8 becomes U+FFFD."""
        return self.bytes_of(token_ids, shows_special=shows_special).decode(errors="replace")

    def _encode(self, text: str, limit: int | None = None) -> list[int]:
        ids: list[int] = []
        start, run, of_run = 0, "", ([0], 0)
        while len(text) - start > 2 * PIECE_CHARS:
            if (part := text[start : start + 2 * PIECE_CHARS]) != run:  # else of spaces, say
                run, of_run = part, self._encode_part(part)
            ids += of_run[0]
            start += of_run[1]
            _rest(limit, ids)
        return ids + self._encode_piece(text[start:])

    def _encode_part(self, text: str) -> tuple[list[int], int]:
        """The tokens of the first part of a text that goes on, and its number of characters. Where the tokens
        of two parts are those of the whole once, they are so whatever comes before and after: byte pair
        encoding merges two tokens or not. Without such a place, the part is all of the text."""
        ids = self._encode_piece(text)
        most = len(ids) - _UNSURE_TOKENS
        for num in range(most, max(0, most - _MOST_CUTS), -1):
            rest = self.decode(ids[num:])
            if text.endswith(rest) and self._encode_piece(rest) == ids[num:]:
                return ids[:num], len(text) - len(rest)
        return ids, len(text)

    def _encode_piece(self, text: str) -> list[int]:
        # `encode` would hold the GIL and compute unused offsets.
        ids: list[int] = self._ordinary.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids


def _rest(limit: int | None, ids: Sequence[int]) -> int | None:
    """How many more there may be. Raises TooManyTokens."""
    if limit is None:
        return None
    if len(ids) > limit:
        raise TooManyTokens
    return limit - len(ids)


def _num_bytes(text: str, ids: "array[int]") -> int:
    """Memory of an entry, at up to 4 bytes per character and about 300 for the objects."""
    return 4 * len(text) + ids.itemsize * len(ids) + 300


def _byte_table(vocab: dict[str, int], special: frozenset[int]) -> tuple[bytes, ...]:
    """Bytes by token id. Byte-level vocabularies have printable bytes as they are, others from U+0100 on."""
    printable, others = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}, count(0x100)
    to_byte = {chr(byte if byte in printable else next(others)): byte for byte in range(0x100)}
    table = [b""] * (max([*vocab.values(), *special]) + 1)
    for text, token_id in vocab.items():
        if token_id in special:
            continue
        try:
            table[token_id] = bytes([to_byte[character] for character in text])
        except KeyError as error:
            raise ValueError(f"token {token_id} ({text!r}) is not in byte-level encoding") from error
    return tuple(table)


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

    def too_long(self, path: str, num_tokens: int | None = None) -> "ContextTooLong":
        """The error for so many tokens in the field `path`; None: for more than `max_counted_tokens`."""
        return ContextTooLong(
            f"This model's maximum context length is {self.context_length} tokens, but `{path}` has "
            f"{num_tokens or f'more than {self.max_counted_tokens}'} tokens. Leave room for the answer.",
            param=path,
        )


class ContextTooLong(BatonError, code="context_length_exceeded", status=400):
    """The prompt fills the model's context."""


RETRY_S = 1.0


class Tokenizers:
    """Loads tokenizers in threads, again and again while a worker of the model is registered."""

    def __init__(self, model_path: Path | None) -> None:
        """`model_path` is read instead of the workers' paths."""
        self.loaded: dict[str, ModelTokenizer] = {}
        self._model_path = model_path
        self._folders: dict[str, dict[Path, None]] = {}  # in order, each once
        self._loading: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}  # set after the first try

    def load(self, workers: Iterable[WorkerInfo]) -> None:
        """Begin to load what these workers need, which are all that are registered."""
        self._folders = {}
        for worker in workers:
            folder = self._model_path or Path(worker.model_path)
            self._folders.setdefault(worker.model, {})[folder] = None
        for model in self._folders.keys() - self.loaded.keys() - self._loading.keys():
            tried = asyncio.Event()
            self._loading[model] = asyncio.create_task(self._load(model, tried)), tried

    async def tried(self) -> None:
        """Return when every tokenizer that is needed is loaded, or could not be loaded once."""
        for _, tried in list(self._loading.values()):
            await tried.wait()

    def tasks(self) -> list[asyncio.Task[None]]:
        return [task for task, _ in self._loading.values()]

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
            del self._loading[model]
