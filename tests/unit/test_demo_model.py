"""The demo checkpoint's tools: the forward pass that trained it is transformers'."""

from pathlib import Path

import pytest


def test_the_training_forward_pass_computes_what_transformers_computes() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tools.demo_network import document_masks, hidden_states  # noqa: PLC0415 torch is optional here
    from tools.score_demo_model import DemoModel  # noqa: PLC0415 torch is optional here

    model = DemoModel(Path("models/demo")).model
    ids = torch.arange(2 * 150).view(2, 150) % 3000
    positions = torch.arange(150).expand(2, -1)
    with torch.no_grad():
        states, _ = hidden_states(model, ids, positions, document_masks(torch.ones_like(ids)))
        torch.testing.assert_close(model.lm_head(states), model(ids).logits, rtol=1e-4, atol=1e-3)
