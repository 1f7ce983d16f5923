"""What Baton uses of vLLM's private names and settings, against the recorded facts of each tried release."""

import ast
import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine_calls import ask
from workers.engines.library.model_facts import read_model_facts
from workers.engines.library.settings import QUEUE_SIZE
from workers.engines.vllm.library import SIDE_CHANNEL_PORT, load_library
from workers.engines.vllm.patches import TRIED, connector, release
from workers.engines.vllm.sampling import sampling_params
from workers.engines.vllm.settings import VLLM_RULES
from workers.flags import DisaggregationMode

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests" / "doubles").glob("vllm_contract_*.json"))
VARIABLE = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
PATCHED = {"NixlPullConnector": connector.PeerConnector, "NixlPullConnectorWorker": connector.PeerWorker}


def release_of(path: Path) -> tuple[int, ...]:
    return tuple(map(int, path.stem.rpartition("_")[2].split(".")))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def facts(request: pytest.FixtureRequest) -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(request.param.read_text())
    return recorded


def test_each_tried_release_is_recorded() -> None:
    assert tuple(map(release_of, FILES)) == TRIED


@pytest.mark.parametrize("name", PATCHED)
def test_methods_that_replace_nixls_have_its_parameters(name: str, facts: dict[str, Any]) -> None:
    own = {n: f for n, f in vars(PATCHED[name]).items() if n in facts["private"][name]}
    assert set(own) >= set(facts["private"][name]) - {"_apply_prefix_caching", "_handle_failed_transfer"}
    for method, function in own.items():
        _, *parameters = inspect.signature(function).parameters.values()
        wanted = [text.partition("=")[0] for text in facts["private"][name][method]]
        if parameters and parameters[-1].kind in VARIABLE:
            parameters.pop()
            wanted = wanted[: len(parameters)]
        assert [parameter.name for parameter in parameters] == wanted, method


def test_the_private_names_that_patches_use_are_there(facts: dict[str, Any]) -> None:
    known = set(facts["nixl_worker"]) | set(facts["private"]["NixlPullConnectorWorker"])
    assert used("self", connector, "PeerWorker") <= known
    assert used("worker", release, "KvPins") <= known
    assert used("scheduler", connector, "PeerConnector") <= set(facts["nixl_scheduler"])
    assert used("topology", connector, "PeerWorker") <= set(facts["private"]["TransferTopology"])
    assert used("remote", connector, "PeerWorker") <= set(facts["read"]["EngineTransferInfo"])


def used(variable: str, module: Any, name: str) -> set[str]:
    """The attributes of that variable in a class, without those that the class itself defines or sets."""
    tree = ast.parse(inspect.getsource(getattr(module, name)))
    found: dict[type[ast.expr_context], set[str]] = {ast.Load: set(), ast.Store: set()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == variable:
            found[type(node.ctx)].add(node.attr)
    assert found[ast.Load], "nothing uses it"
    replaced = {"xfer_handshake_metadata"}  # NIXL's own, which is set anew
    own = set(vars(getattr(module, name))) | found[ast.Store] - replaced
    return found[ast.Load] - own


def test_a_rank_is_named_in_nixls_table_as_on_the_side_channel(facts: dict[str, Any]) -> None:
    returned = {2: "dict[int, str]", 3: "tuple[dict[tuple[int, int], str], float]"}
    assert facts["nixl_handshake"]["returns"] == returned[len(facts["nixl_handshake"]["asks"].split(","))]


def test_compiled_code_is_named_after_the_side_channels_port(facts: dict[str, Any]) -> None:
    assert facts["compile_factors"]["called"] == ["envs.compile_factors"]
    assert SIDE_CHANNEL_PORT in facts["compile_factors"]["side_channel"]


def test_what_checks_guesses_is_called_and_calls_as_vllms_does(facts: dict[str, Any]) -> None:
    """By position, up to the number of guesses."""
    called = [text.partition("=")[0] for text in facts["draws"]["rejection_sample"]]
    assert called[10:] == [
        "num_speculative_steps", "synthetic_conditional_rates", "use_fp64", "use_block_verification"
    ]  # fmt: skip
    assert [called[i] for i in (0, 2, 3, 4)] == ["target_logits", "draft_sampled", "cu_num_logits", "pos"]
    assert [called[i] for i in (6, 8, 9)] == ["expanded_idx_mapping", "temperature", "seed"]
    drawn = [text.partition("=")[0] for text in facts["draws"]["gumbel_sample"]]
    assert drawn[:6] == ["logits", *(called[i] for i in (6, 8, 9, 4)), "apply_temperature"]
    assert "use_fp64" in drawn


@pytest.mark.parametrize("mode", ["agg", "prefill", "decode"])
def test_the_settings_that_baton_gives_are_there(mode: DisaggregationMode, facts: dict[str, Any]) -> None:
    for path in (ROOT / "engine_configs" / "vllm").glob(f"*/{mode}*.yaml"):
        given = VLLM_RULES.give(None, mode, yaml_path=path, typed={"model": "m", "max_batch_size": 1})
        names = {name.partition(".")[0] for name in given} - {QUEUE_SIZE}
        assert names <= set(facts["AsyncEngineArgs"])


def test_the_sampling_that_baton_gives_is_there(facts: dict[str, Any]) -> None:
    given: dict[str, Any] = {}
    lib = dataclasses.replace(load_library(), sampling_params=given.update)
    sampling_params(ask(), lib, read_model_facts(ROOT / "models" / "demo"), max_tokens=5, transfer={})
    assert given
    assert set(given) <= set(facts["SamplingParams"])
