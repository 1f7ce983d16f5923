"""An API key's requests and tokens per minute, on a clock of the test's own."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.http.limits import NO_QUOTA, Quota, Quotas, RateLimited, Used


class Minutes:
    """A clock, in seconds, and a quota of `alice` that runs on it; `told` is what other processes hear."""

    def __init__(self, requests: int | None = None, tokens: int | None = None) -> None:
        self.now_s = 1000.0
        self.told: list[Used] = []
        given = {"requests": requests, "tokens": tokens}
        self.limits = {what: num for what, num in given.items() if num}
        self.quotas = Quotas(self.told.append, lambda: self.now_s)

    @property
    def quota(self) -> Quota:
        return self.quotas.of("alice", self.limits)

    def refused_s(self) -> float | None:
        """The Retry-After of a request now; None if it is admitted."""
        try:
            self.quota.admit()
        except RateLimited as error:
            return error.retry_after_s
        return None


def test_as_many_requests_as_the_limit_at_once_and_then_at_its_rate() -> None:
    time = Minutes(requests=6)
    assert [time.refused_s() for _ in range(8)] == [None] * 6 + [10.0] * 2
    time.now_s += 9.0
    assert time.refused_s() == pytest.approx(1.0)
    time.now_s += 1.0
    assert time.refused_s() is None
    assert time.refused_s() == pytest.approx(10.0)
    time.now_s += 3600.0
    assert [time.refused_s() for _ in range(7)] == [None] * 6 + [10.0]


def test_prompt_and_answer_count_and_what_is_overdrawn_is_made_up_for() -> None:
    time = Minutes(tokens=60)
    assert time.refused_s() is None
    time.quota.take_prompt(50)
    time.quota.take_answer(40)  # 30 too many
    assert time.refused_s() == pytest.approx(31.0)
    time.now_s += 31.0
    assert time.refused_s() is None


def test_a_prompt_is_refused_if_others_used_the_tokens_since_the_request_came() -> None:
    time = Minutes(tokens=90)
    quota = time.quota
    quota.admit()
    quota.admit()
    quota.take_prompt(90)
    with pytest.raises(
        RateLimited, match="'alice' has reached its limit of 90 tokens per minute; retry in 1 s"
    ):
        quota.take_prompt(1)


def test_a_long_answer_is_taken_when_it_ends() -> None:
    time = Minutes(tokens=60)
    time.quota.admit()
    time.now_s += 60.0
    time.quota.take_answer(60)
    assert time.refused_s() == pytest.approx(1.0)


def test_a_refused_request_costs_nothing() -> None:
    time = Minutes(requests=1, tokens=60)
    time.quota.take_answer(60)
    assert [time.refused_s() for _ in range(5)] == [1.0] * 5
    assert [used.what for used in time.told] == ["tokens"]


def test_the_headers_are_openais() -> None:
    time = Minutes(requests=2, tokens=60)
    time.quota.admit()
    time.quota.take_answer(90)
    assert {name.decode(): value.decode() for name, value in time.quota.headers()} == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "30.000s",
        "x-ratelimit-limit-tokens": "60",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "90.000s",
    }
    time.now_s += 45.0
    now = {name.decode(): value.decode() for name, value in time.quota.headers()}
    assert now["x-ratelimit-remaining-requests"] == "2"
    assert now["x-ratelimit-remaining-tokens"] == "15"


def test_without_limits_there_is_no_quota_and_with_new_ones_a_new_quota() -> None:
    time = Minutes(requests=1)
    assert time.quotas.of("bob", {}) is NO_QUOTA
    assert [time.refused_s(), time.refused_s()] == [None, 60.0]
    time.limits = {"requests": 2}
    assert [time.refused_s(), time.refused_s(), time.refused_s()] == [None, None, 30.0]


def test_what_another_process_reports_counts_here_too() -> None:
    here, there = Minutes(requests=2, tokens=60), Minutes(requests=2, tokens=60)
    there.quota.admit()
    there.quota.take_prompt(30)
    there.quota.take_answer(30)
    there.quota.take_answer(0)  # nothing to tell
    assert [(used.what, used.num) for used in there.told] == [("requests", 1), ("tokens", 30), ("tokens", 30)]
    for used in there.told:
        here.quotas.note(used)
    assert here.refused_s() == there.refused_s() == 1.0
    assert here.told == []


@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 50), st.integers(0, 200)), max_size=60),
)
def test_no_more_tokens_than_the_rate_but_for_the_last_request(
    per_minute: int, steps: Sequence[tuple[float, int, int]]
) -> None:
    time = Minutes(tokens=per_minute)
    begin_s, taken, last = time.now_s, 0, 0
    for pause_s, prompt, answer in steps:
        time.now_s += pause_s
        if time.refused_s() is None:
            assert taken <= per_minute + (time.now_s - begin_s) * per_minute / 60
            time.quota.take_prompt(prompt)
            time.quota.take_answer(answer)
            taken += prompt + answer
            last = max(last, prompt + answer)
    assert taken <= per_minute + (time.now_s - begin_s) * per_minute / 60 + last
