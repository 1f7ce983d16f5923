"""gpt-oss's real vocabulary for tests, as a tokenizer.json: fetched with the npm package js-tiktoken."""

import argparse
import base64
import hashlib
import itertools
import json
import os
import re
import subprocess
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "js-tiktoken@1.0.21"
RANKS_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
FOLDER = Path(__file__).parents[1] / "tests" / "data" / ".vocab"
NUM_RANKS = 199_998
VOCAB_SIZE = 201_088
CONTROL_TOKENS = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
}
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def main() -> None:
    """`make vocab`: fetch the ranks and convert them to tokenizer.json, unless both exist."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    if vocabulary_folder() is None:
        _write(_fetch())
    print(f"vocabulary: {FOLDER}")


def vocabulary_folder() -> Path | None:
    """The folder of o200k_base.tiktoken and tokenizer.json, or None if they were not fetched.

    If BATON_O200K names a file of ranks, it is used instead of fetching."""
    if not (FOLDER / "tokenizer.json").exists():
        if "BATON_O200K" not in os.environ:
            return None
        _write(Path(os.environ["BATON_O200K"]).read_bytes())
    return FOLDER


def _write(ranks: bytes) -> None:
    """Write both files, tokenizer.json last and atomically, so that its existence means success. Takes
    seconds."""
    digest = hashlib.sha256(ranks).hexdigest()
    if digest != RANKS_SHA256:
        raise ValueError(f"these are not o200k_base's ranks: sha256 {digest}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / ".gitignore").write_text("*\n")
    (FOLDER / "o200k_base.tiktoken").write_bytes(ranks)
    partial = FOLDER / f"tokenizer.json.{os.getpid()}"
    partial.write_text(json.dumps(_tokenizer(ranks), ensure_ascii=False))
    partial.replace(FOLDER / "tokenizer.json")


def _tokenizer(lines: bytes) -> dict[str, object]:
    """gpt-oss's tokenizer.json from the ranks' lines `BASE64 RANK`."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines.splitlines())}
    names = {i: CONTROL_TOKENS.get(i, f"<|reserved_{i}|>") for i in range(NUM_RANKS, VOCAB_SIZE)}
    characters = _characters()
    written = {token: "".join(characters[byte] for byte in token) for token in ranks}
    merges = [[written[part] for part in _last_merge(token, ranks)] for token in ranks if len(token) > 1]
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [_added_token(token_id, name) for token_id, name in names.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {written[token]: rank for token, rank in ranks.items()},
            "merges": merges,
        },
    }


def _fetch() -> bytes:
    """The ranks file, from the package's lines `! OFFSET TOKEN TOKEN ...`."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, check=True, timeout=120)
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
            member = archive.extractfile("package/dist/ranks/o200k_base.js")
            assert member is not None
            source = member.read().decode()
    lines = re.search(r'"bpe_ranks":"([^"]*)"', source)
    assert lines is not None
    tokens: dict[int, str] = {}
    for line in lines[1].replace("\\n", "\n").splitlines():
        _, offset, *words = line.split()
        tokens |= {int(offset) + i: word for i, word in enumerate(words)}
    return "".join(f"{tokens[rank]} {rank}\n" for rank in sorted(tokens)).encode()


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two parts that form `token` in the last merge of its own encoding."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(left + right, NUM_RANKS) for left, right in itertools.pairwise(parts)]
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def _characters() -> dict[int, str]:
    """GPT-2's byte mapping: printable bytes map to themselves, others to characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def _added_token(token_id: int, content: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": True}


if __name__ == "__main__":
    main()
