"""schemathesis over the OpenAPI page: whatever a client sends, no 5xx, no hang, and answers as documented."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stack import MODEL, Stack
from tests.waiting import scaled, wait_for

# Answers without a limit end soon.
SETTINGS = {
    "mocker": "prefill_tokens_per_s: 1000000\ndecode_step_ms: 0.1\nkv_transfer_ms: 0\nmax_seq_len: 512\n",
    "embedded": "max_seq_len: 256\n",
}
_GIVEN = os.environ.get("BATON_FUZZ_EXAMPLES")
# The frontend's part is the same with both; the embedded engine takes 20 times as long for an answer.
NUM_EXAMPLES = {"mocker": int(_GIVEN or 60), "embedded": int(_GIVEN or 10)}
PHASES = {"mocker": "examples,coverage,fuzzing,stateful", "embedded": "examples,fuzzing"}
SEED = os.environ.get("BATON_FUZZ_SEED", "7")
REQUEST_TIMEOUT_S = round(scaled(30))
LIMIT_S = scaled(1800)
# Neither tells a fault here: what is valid by the schema is not always served (`stream_options` without
# `stream`), and unknown fields are ignored.
NOT_CHECKED = "positive_data_acceptance,negative_data_rejection"


@pytest.fixture(params=SETTINGS)
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def stack(engine: str, tmp_path: Path) -> Iterator[Stack]:
    yaml = tmp_path / "engine.yaml"
    yaml.write_text(SETTINGS[engine])
    with Stack(tmp_path) as stack:
        stack.serve("prefill", "decode", engine=engine, yaml=yaml)
        yield stack


def narrowed(stack: Stack, response_ids: list[str]) -> dict[str, Any]:
    """The page, with model names and response ids that exist (others never get past a 404)."""
    page: dict[str, Any] = stack.get("/openapi.json").json()
    for schema in page["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": [MODEL]}
    known = {"response_id": [*response_ids, "resp_unknown"], "model": [MODEL, "unknown"]}
    for operations in page["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", []):
                if parameter["in"] == "path":
                    parameter["schema"] = {"enum": known[parameter["name"]]}
    return page


def answered(stack: Stack, page: dict[str, Any]) -> dict[str, bool]:
    """For each operation that takes a body, whether one was good enough for an answer."""
    text = stack.get("/metrics").text
    routes = re.findall(r'^baton_requests_total{.*route="([^"]*)".*status="200"', text, re.MULTILINE)
    return {
        path: path in routes
        for path, operations in page["paths"].items()
        if "requestBody" in operations.get("post", {})
    }


@pytest.mark.timeout(1860)  # scaled, like LIMIT_S
def test_no_request_makes_a_server_error_or_hangs(engine: str, stack: Stack, tmp_path: Path) -> None:
    body = {"input": "Hello there!", "max_output_tokens": 20}
    operations = narrowed(stack, [stack.answer("/v1/responses", **body)["id"] for _ in range(8)])
    page = tmp_path / "openapi.json"
    page.write_text(json.dumps(operations))

    command = [str(Path(sys.executable).with_name("schemathesis")), "run", str(page), "--url", stack.url]
    command += ["--max-examples", str(NUM_EXAMPLES[engine]), "--request-timeout", str(REQUEST_TIMEOUT_S)]
    command += ["--suppress-health-check", "too_slow"]  # of making requests
    command += ["--mode", "all", "--continue-on-failure", "--seed", SEED, "--generation-database", "none"]
    command += [
        "--phases",
        PHASES[engine],
        "--exclude-checks",
        NOT_CHECKED,
        "--warnings",
        "off",
        "--no-color",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path, check=False)

    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    bodies = answered(stack, operations)
    assert {"/v1/messages", "/v1/messages/count_tokens"} <= bodies.keys()
    assert all(bodies.values()), bodies
    for process in stack.processes:
        assert "Traceback" not in process.text()
    wait_for(lambda: stack.get("/health").status_code == 200)
    stack.wait_idle()
