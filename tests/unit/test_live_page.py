"""What serves the live page: its files, their headers, who sees ids, `--no-page`."""

import json
import re
from pathlib import Path

import pytest

from frontend import snapshot
from frontend.http.guards import Guards
from frontend.http.keys import line_of, parse_keys
from frontend.record import STAGES
from tests.scripted_frontend import Client, ScriptedTokens

ANSWER = "<|channel|>final<|message|>Hello<|return|>"


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/", "html"), ("/page/page.css", "css"), ("/page/page.js", "javascript"), ("/page/icon.svg", "svg")],
)
async def test_files_are_fresh_and_load_nothing_from_elsewhere(path: str, kind: str) -> None:
    client = Client(ScriptedTokens())
    found = await client.get(path)
    assert (found.status, kind in found.headers["content-type"]) == (200, True)
    policy = found.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "form-action 'none'"} < set(
        policy
    )
    assert "unsafe" not in "".join(policy)
    assert found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["referrer-policy"] == "no-referrer"
    again = await client.request("GET", path, b"", {"if-none-match": found.headers["etag"]})
    assert (again.status, again.body) == (304, b"")


def test_the_page_draws_each_stage_as_the_table_says() -> None:
    script = Path(snapshot.__file__).with_name("page").joinpath("page.js").read_text()
    (table,) = re.findall(r"const STAGES = \{(.*?)\}", script, re.DOTALL)
    assert re.findall(r'(\w+): "(\w+)"', table) == [(stage, rule.group) for stage, rule in STAGES.items()]


async def test_without_the_page_its_figures_stay() -> None:
    client = Client(ScriptedTokens(), has_page=False)
    assert [(await client.get(path)).status for path in ("/", "/page/page.js")] == [404, 404]
    assert (await client.get("/fleet")).json["models"] == client.services.fleet.models()


@pytest.mark.parametrize(("key", "is_shown"), [("", False), ("sk-alice", False), ("sk-root", True)])
async def test_ids_are_for_admin_keys(key: str, is_shown: bool) -> None:
    client = Client(ScriptedTokens(ANSWER))
    await client.request("POST", "/v1/completions", b"{", {"x-request-id": "mine-1"})
    keys = parse_keys("\n".join([line_of("alice", "sk-alice"), line_of("root", "sk-root", is_admin=True)]))
    client.app = Guards(client.app, client.services.metrics, keys=lambda: keys)
    headers = {"x-api-key": key} if key else {}
    page = await client.request("GET", "/metrics", b"", headers)
    assert (page.status, b"baton_key_requests_total{" in page.body) == (200, is_shown)
    found = await client.request("GET", "/fleet", b"", headers)
    assert json.loads(found.body)["slowest"][0]["request_id"] == ("mine-1" if is_shown else None)


async def test_one_viewer_too_many_is_refused_with_a_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_VIEWERS", 0)
    client = Client(ScriptedTokens())
    found = await client.request("GET", "/fleet", b"", {"accept": "text/event-stream"})
    assert (found.status, found.error["code"], "retry-after" in found.headers) == (503, "not_ready", True)
