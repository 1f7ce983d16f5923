"""Log probabilities in the completions API's shape."""

import math
from pathlib import Path

from baton.messages import TokenLogprob
from frontend.completions import legacy_logprobs
from frontend.http.answer import content_logprobs
from frontend.text.tokenizer import ModelTokenizer

TOKENIZER = ModelTokenizer.load(Path(__file__).parents[2] / "models/demo")


def entries(text: str) -> list[TokenLogprob]:
    return [TokenLogprob(i, -0.5, ((i, -0.5),)) for i in TOKENIZER.encode_text(text)]


def test_a_probability_of_zero_is_a_number_that_json_has() -> None:
    never = [TokenLogprob(5, -math.inf, ((5, -math.inf),))]
    (content,) = content_logprobs(never, TOKENIZER)
    assert (content.logprob, content.top_logprobs[0].logprob) == (-9999, -9999)
    legacy = legacy_logprobs(never, TOKENIZER, int)
    assert (legacy.token_logprobs, list((legacy.top_logprobs[0] or {}).values())) == ([-9999], [-9999])


def test_a_part_of_a_character_is_told_by_its_bytes() -> None:
    parts = content_logprobs(entries("\U0001f9ff"), TOKENIZER)
    assert len(parts) > 1, "the demo tokenizer has no token for it"
    assert bytes(byte for part in parts for byte in part.bytes).decode() == "\U0001f9ff"
    assert parts[0].token == "\ufffd"
    assert [top.bytes for top in parts[0].top_logprobs] == [parts[0].bytes]
