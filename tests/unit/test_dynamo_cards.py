"""Dynamo's model cards as registrations."""

import json
from typing import Any

import msgspec
import pytest

from baton.dynamo.cards import worker_of
from baton.messages import Role, WorkerInfo
from baton.pairing import why_not_paired
from tests.scripted_workers import worker

CARD = """{
"display_name": "openai/gpt-oss-120b", "slug": "openai_gpt-oss-120b", "source_path": "/models/demo",
"tokenizer": {"hf_tokenizer_json": {"path": "/models/demo/tokenizer.json", "checksum": "blake3:50"}},
"architectural_max_context_length": 4096, "context_length": 0, "kv_cache_block_size": 64,
"model_type": "", "model_input": "Tokens", "worker_type": "prefill", "needs": [["decode"]],
"runtime_config": {"context_length": 0, "total_kv_blocks": 16384, "max_num_seqs": 256,
"tool_call_parser": null, "runtime_data": {"a": true}}, "media_decoder": null}"""


def registered(instance: int = 255, **changes: Any) -> WorkerInfo:
    config = json.loads(CARD)["runtime_config"] | changes.pop("runtime_config", {})
    found = worker_of("a.b.c", instance, json.dumps(json.loads(CARD) | changes | {"runtime_config": config}))
    assert found is not None
    return found


def test_a_worker_has_its_cards_role_model_and_limits() -> None:
    info = registered()

    assert (info.role, info.model, info.model_path) == (Role.PREFILL, "openai/gpt-oss-120b", "/models/demo")
    assert (info.context_length, info.max_batch_size, info.refusal) == (4096, 256, "")
    assert (info.worker_id, info.address, info.endpoint) == ("prefill-ff", "dynamo:a.b.c/255", "dyn://a.b.c")
    assert registered(worker_type="aggregated").role is Role.DECODE


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"worker_type": "encode"}, "worker type"),
        ({"worker_type": None}, "worker type"),
        ({"model_input": "Text"}, "model input"),
        ({"runtime_config": {"context_length": 1_000_000}}, "context"),
        ({"context_length": -5}, "context"),
        ({"architectural_max_context_length": 0}, "context"),
        ({"runtime_config": {"disaggregated_endpoint": {"bootstrap_host": "h"}}}, "pushed"),
    ],
)
def test_a_card_that_cannot_be_served_is_registered_with_its_refusal(
    changes: dict[str, Any], why: str
) -> None:
    info = registered(**changes)
    assert why in info.refusal
    assert not info.is_ready


def test_a_card_that_contradicts_the_workers_own_entry_is_refused() -> None:
    own = msgspec.structs.replace(worker("d"), model="openai/gpt-oss-120b")
    data = {"runtime_data": {"baton": msgspec.to_builtins(own)}}
    for role, model in (("prefill", own.model), ("decode", "other")):
        info = registered(worker_type=role, display_name=model, runtime_config=dict(data))
        assert "in `baton`" in info.refusal


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"display_name": 5}', '{"display_name": "' + "x" * 300_000]
)
def test_what_is_no_card_is_skipped(text: str) -> None:
    assert worker_of("a.b.c", 1, text) is None


def test_a_worker_of_batons_has_its_own_facts_and_pairs_with_its_kind_only() -> None:
    own = msgspec.structs.replace(worker("d"), model="openai/gpt-oss-120b", name="left")
    mine = registered(
        worker_type="decode", runtime_config={"runtime_data": {"baton": msgspec.to_builtins(own)}}
    )

    assert (mine.name, mine.engine, mine.address) == ("left", "scripted", "dynamo:a.b.c/255")
    assert why_not_paired(registered(), mine) is not None
    assert why_not_paired(registered(), registered(2, worker_type="decode")) is None
