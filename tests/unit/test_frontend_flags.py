"""The frontend's settings: values that are refused, with the flag and what is allowed."""

from typing import Any

import pytest

from baton.flags import read
from frontend.flags import FrontendSettings


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("--local-prefill-after-s", "-0.5", "at least 0"),
        ("--max-wait-s", "nan", "a finite number of at most 1e.15"),
        ("--request-timeout-s", "0", "above 0"),
        ("--http-port", "65536", "at least 0 and at most 65535"),
        ("--num-processes", "0", "at least 1 and at most 64"),
    ],
)
def test_numbers_out_of_range_are_refused_by_their_flag(flag: str, value: str, allowed: str) -> None:
    with pytest.raises(ValueError, match=f"^{flag} {value}: must be {allowed}$"):
        read(FrontendSettings, [f"{flag}={value}"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"allowed_host": "a.example, http://b.example"},
            "--allowed-host 'http://b.example': must be a name",
        ),
        ({"allowed_host": "a.example:8000"}, "--allowed-host 'a.example:8000': must be a name"),
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
    flags = ["--num-processes=1", "--local-prefill-after-s=0", "--current-date=2026-01-01"]
    for port in (0, 65535):
        settings = read(FrontendSettings, [*flags, f"--http-port={port}"]).settings
        assert (settings.http_port, settings.current_date) == (port, "2026-01-01")


def test_origins_and_names_of_this_server_are_lists_without_empty_entries() -> None:
    settings = FrontendSettings(
        cors_origin=" https://a.example, ,https://b.example,", allowed_host="a.example, *.svc.local,*"
    )
    assert settings.cors_origins == ["https://a.example", "https://b.example"]
    assert settings.allowed_hosts == ["127.0.0.1", "a.example", "*.svc.local", "*"]
    assert FrontendSettings().cors_origins == []
