"""Log probabilities of TensorRT-LLM and vLLM: one mapping per token, of which the last may lack."""

from types import SimpleNamespace

from baton.messages import TokenLogprob
from workers.engines.library.requests import token_logprobs

TOLD = [
    {5: SimpleNamespace(logprob=-2.0), 6: SimpleNamespace(logprob=-0.5), 7: SimpleNamespace(logprob=-1.0)},
    {8: SimpleNamespace(logprob=-0.25)},
]


def test_each_token_has_its_own_and_the_likeliest_first() -> None:
    assert token_logprobs([5, 8], TOLD, 2) == (
        TokenLogprob(5, -2.0, ((6, -0.5), (7, -1.0))),
        TokenLogprob(8, -0.25, ((8, -0.25),)),
    )


def test_what_was_not_told_is_very_unlikely() -> None:
    unlikely = TokenLogprob(9, -9999.0, ())
    assert token_logprobs([5, 9], TOLD[:1], 0) == (TokenLogprob(5, -2.0, ()), unlikely)
    assert token_logprobs([9], None, 2) == (unlikely,)
    assert token_logprobs([9], TOLD[:1], 1) == (TokenLogprob(9, -9999.0, ((6, -0.5),)),)
