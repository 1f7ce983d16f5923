"""The demo checkpoint: its files, and that it makes the call of the guide's first round."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

from frontend.text.tokenizer import SpecialToken
from tools.demo_guide import guide_conversation

if TYPE_CHECKING:
    from tools.score_demo_model import DemoModel

_FOLDER = Path(__file__).parents[2] / "models" / "demo"
_MAX_FOLDER_BYTES = 20 * 1024 * 1024


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(_FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((_FOLDER / "config.json").read_text())
    return loaded


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    ],
)
def test_the_folder_has_the_files_of_a_hugging_face_model(name: str) -> None:
    assert (_FOLDER / name).stat().st_size > 0


def test_the_folder_is_at_most_20_megabytes() -> None:
    assert sum(path.stat().st_size for path in _FOLDER.iterdir()) <= _MAX_FOLDER_BYTES


def test_the_config_is_gpt_oss_with_its_peculiarities(config: dict[str, Any]) -> None:
    assert config["architectures"] == ["GptOssForCausalLM"]
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * (
        config["num_hidden_layers"] // 2
    )
    assert 0 < config["sliding_window"] < config["max_position_embeddings"]
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert 1 < config["num_experts_per_tok"] < config["num_local_experts"]


def test_the_weights_have_sinks_and_experts_in_every_layer(config: dict[str, Any]) -> None:
    raw = (_FOLDER / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        assert header[f"{prefix}.self_attn.sinks"]["shape"] == [config["num_attention_heads"]]
        assert header[f"{prefix}.mlp.experts.down_proj"]["shape"][0] == config["num_local_experts"]


@pytest.mark.parametrize("token", SpecialToken)
def test_every_control_token_is_one_id_of_its_own(tokenizer: Tokenizer, token: SpecialToken) -> None:
    ids = tokenizer.encode(token.value).ids
    assert ids == [tokenizer.token_to_id(token.value)]
    assert tokenizer.decode(ids, skip_special_tokens=False) == token.value


def test_generation_stops_after_an_answer_or_a_call(tokenizer: Tokenizer) -> None:
    stops = json.loads((_FOLDER / "generation_config.json").read_text())["eos_token_id"]
    wanted = (SpecialToken.RETURN, SpecialToken.CALL, SpecialToken.ENDOFTEXT)
    assert stops == [tokenizer.token_to_id(token.value) for token in wanted]


@pytest.mark.parametrize("text", ["Ünïcödé 漢字 🚀 \x00\t\n  \r", '{"location":"San Francisco, CA"}', ""])
def test_every_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_word_is_the_same_tokens_in_a_sentence_a_name_and_quotes(tokenizer: Tokenizer) -> None:
    (word,) = tokenizer.encode("weather").tokens
    for text in ("the weather in", "get_weather", '{"weather":1}', "weather."):
        assert word in tokenizer.encode(text).tokens


@pytest.fixture(scope="module")
def model() -> "DemoModel":
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tools.score_demo_model import DemoModel  # noqa: PLC0415 torch is optional here

    return DemoModel(_FOLDER)


def test_the_model_reasons_and_calls_in_the_first_round_of_the_guide(model: "DemoModel") -> None:
    output = model.answer(guide_conversation(second_round=False))
    assert output.reasoning
    assert (output.name, output.arguments) == ("get_system_health", "{}")


def test_the_model_answers_from_the_result_in_the_second_round_of_the_guide(model: "DemoModel") -> None:
    output = model.answer(guide_conversation(second_round=True))
    assert output.reasoning
    assert output.text is not None
    assert "ok" in output.text or "372045" in output.text


def test_the_training_forward_pass_computes_what_transformers_computes(model: "DemoModel") -> None:
    torch = pytest.importorskip("torch")
    from tools.demo_network import document_masks, hidden_states  # noqa: PLC0415 torch is optional here

    ids = torch.arange(2 * 150).view(2, 150) % 3000
    positions = torch.arange(150).expand(2, -1)
    with torch.no_grad():
        states, _ = hidden_states(model.model, ids, positions, document_masks(torch.ones_like(ids)))
        torch.testing.assert_close(model.model.lm_head(states), model.model(ids).logits, rtol=1e-4, atol=1e-3)
