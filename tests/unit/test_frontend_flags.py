"""The frontend's settings: values that are refused, with the flag and what is allowed."""

import math
from typing import Any

import pytest

from frontend.flags import FrontendSettings


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("local_prefill_tokens", -1, "0 or more"),
        ("local_prefill_after_s", -0.5, "0 or more"),
        ("max_wait_s", -1.0, "0 or more"),
        ("max_wait_s", math.nan, "0 or more"),
        ("wait_for_worker_s", -1.0, "0 or more"),
        ("wait_for_worker_s", math.nan, "0 or more"),
        ("drain_timeout_s", -1.0, "0 or more"),
        ("drain_timeout_s", math.nan, "0 or more"),
        ("request_timeout_s", 0.0, "greater than 0"),
        ("no_progress_s", 0.0, "greater than 0"),
        ("no_progress_s", math.nan, "greater than 0"),
    ],
)
def test_numbers_out_of_range_are_refused_by_their_flag(name: str, value: Any, allowed: str) -> None:
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ValueError, match=f"^{flag} {value:g}: must be {allowed}$"):
        FrontendSettings(**{name: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"http_port": 65536}, "--http-port 65536: must be between 0 and 65535"),
        ({"http_port": -1}, "--http-port -1: must be between 0 and 65535"),
        ({"num_processes": 0}, "--num-processes 0: must be between 1 and 64"),
        ({"num_processes": 65}, "--num-processes 65: must be between 1 and 64"),
        ({"model_alias": "gpt-9"}, "--model-alias"),
        ({"current_date": "20260101"}, "--current-date '20260101': must be YYYY-MM-DD"),
        ({"current_date": "2026-1-1"}, "--current-date '2026-1-1': must be YYYY-MM-DD"),
        ({"current_date": "today"}, "--current-date 'today': must be YYYY-MM-DD"),
    ],
)
def test_other_bad_settings_are_refused_by_their_flag(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FrontendSettings(**settings)


def test_the_smallest_and_largest_values_are_allowed() -> None:
    settings = FrontendSettings(
        http_port=65535, num_processes=1, local_prefill_after_s=0.0, current_date="2026-01-01"
    )
    assert (settings.http_port, settings.current_date) == (65535, "2026-01-01")
    assert FrontendSettings(http_port=0).http_port == 0


def test_origins_are_a_list_without_empty_ones() -> None:
    assert FrontendSettings().cors_origins == []
    settings = FrontendSettings(cors_origin=" https://a.example, ,https://b.example,")
    assert settings.cors_origins == ["https://a.example", "https://b.example"]


def test_by_default_only_this_machine_is_served_and_nothing_takes_for_ever() -> None:
    settings = FrontendSettings()
    assert (settings.http_host, settings.insecure, settings.take_over) == ("127.0.0.1", False, False)
    assert not settings.knows_clients
    limits_s = (settings.request_timeout_s, settings.wait_for_worker_s, settings.drain_timeout_s)
    assert limits_s == (600.0, 15.0, 30.0)
    assert (settings.no_progress_s, settings.max_wait_s) == (10.0, 50.0)
