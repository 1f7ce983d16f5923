"""Dynamo's bodies and cards, as its mocker 1.6.1 sends them."""

import msgspec
import pytest

from baton.dynamo.messages import DynamoChunk, DynamoRequest, ErrorReason, ModelCard, StopConditions

CARD = """{
"display_name": "openai/gpt-oss-120b", "slug": "openai_gpt-oss-120b", "source_path": "/models/demo",
"tokenizer": {"hf_tokenizer_json": {"path": "/models/demo/tokenizer.json", "checksum": "blake3:50"}},
"architectural_max_context_length": 4096, "context_length": 0, "kv_cache_block_size": 64,
"model_type": "", "model_input": "Tokens", "worker_type": "prefill", "needs": [["decode"]],
"runtime_config": {"context_length": 0, "total_kv_blocks": 16384, "max_num_seqs": 256,
"tool_call_parser": null, "runtime_data": {"a": true}}, "media_decoder": null}"""


def test_a_card_has_role_limits_and_the_tokenizers_path() -> None:
    card = msgspec.json.decode(CARD, type=ModelCard)

    assert (card.worker_type, card.architectural_max_context_length) == ("prefill", 4096)
    assert card.runtime_config.max_num_seqs == 256
    assert card.tokenizer is not None
    assert card.tokenizer["hf_tokenizer_json"].path == "/models/demo/tokenizer.json"


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (
            {"token_ids": [7], "text": None, "output_type": "text", "strange": [1]},
            DynamoChunk(token_ids=(7,)),
        ),
        ({"finish_reason": "length"}, DynamoChunk(finish_reason="length")),
        ({"finish_reason": {"error": "no"}}, DynamoChunk(finish_reason=ErrorReason("no"))),
        ({"disaggregated_params": "dummy"}, DynamoChunk(disaggregated_params="dummy")),
    ],
)
def test_unknown_fields_of_a_chunk_are_ignored(sent: object, read: DynamoChunk) -> None:
    assert msgspec.convert(sent, DynamoChunk) == read


def test_a_request_has_only_what_is_set_and_survives_the_way() -> None:
    request = DynamoRequest(
        token_ids=[1, 2], stop_conditions=StopConditions(max_tokens=1), is_health_check=True
    )

    body = msgspec.to_builtins(request)

    asked = {"token_ids": [1, 2], "stop_conditions": {"max_tokens": 1}, "_HEALTH_CHECK": True}
    assert body == asked | {"sampling_options": {}}  # TensorRT-LLM reads it in any case
    assert msgspec.convert(body, DynamoRequest) == request
