"""The demo checkpoint: its files, and that it makes the call of the guide's first round."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tools.demo_guide import guide_conversation

if TYPE_CHECKING:
    from tools.score_demo_model import DemoModel

_FOLDER = Path(__file__).parents[2] / "models" / "demo"


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
