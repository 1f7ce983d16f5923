"""The engine contract on the real vLLM: tests/contract/test_engine.py with the demo model.

A vLLM takes long to start, so tests with equal settings share one, under a new Baton engine each. All run in
one event loop, hence one `asyncio.Runner`."""

import asyncio
import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.errors import HandoffFailed
from baton.messages import Role
from tests.conftest import free_port
from tests.engine_calls import ask, next_handoff, until_idle
from tests.gpu.vllm_scene import descendants
from tests.tiny_gpt_oss import CONTEXT_LENGTH, prompt
from workers.engine import Engine
from workers.engines.library.engine import LibraryEngine
from workers.engines.library.model_facts import read_model_facts
from workers.engines.vllm.adapter import VllmAdapter
from workers.engines.vllm.library import Library, load_library
from workers.engines.vllm.settings import VLLM_RULES

pytest.register_assert_rewrite("tests.contract.test_engine")
from tests import engines  # noqa: E402  after the line above
from tests.contract import test_engine as contract  # noqa: E402  as above

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),  # each vLLM is lent from one test to the next
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # vLLM's own
]

MODEL = Path("models/demo")
# float32: an answer must not depend on its batch or on how its prompt was chunked.
CONFIG: dict[str, Any] = {
    "dtype": "float32",
    "attention_backend": "TRITON_ATTN",
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "max_model_len": CONTEXT_LENGTH,
    "max_num_batched_tokens": 32,
    "block_size": 16,
    "num_gpu_blocks_override": 512,
    "gpu_memory_utilization": 0.15,
}
# Triton multiplies in TF32. Errors of its size (2 ** -11) in each layer's output change the demo model's log
# probabilities by 0.004; one wrong block of KV changes them by 0.16 to 15.
LOGPROB_TOLERANCE = 0.02


class Lent:
    """A vLLM that outlives the engine that borrows it; its stats go to the latest borrower."""

    def __init__(self) -> None:
        self.llm: Any = None
        self.figures: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llm, name)

    def shutdown(self) -> None:
        """Does nothing: the next test needs it."""

    def record(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's stat logger."""
        self.figures.record(*args, **kwargs)

    def log_engine_initialized(self) -> None:
        """vLLM's stat logger."""


@dataclasses.dataclass(frozen=True)
class Lender:
    """Replaces `Library.llm` for engines with equal settings."""

    lib: Library
    lent: Lent

    def from_engine_args(self, args: Any, stat_loggers: list[Any]) -> Lent:
        """Like AsyncLLM's."""
        self.lent.figures = stat_loggers[0]()
        if self.lent.llm is None:
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            self.lent.llm = self.lib.llm.from_engine_args(args, stat_loggers=[lambda *_: self.lent])
        return self.lent


@pytest.fixture(scope="module")
def kept() -> Iterator[dict[Any, Lent]]:
    """The vLLMs started so far, by their settings."""
    kept: dict[Any, Lent] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "LOGPROB_TOLERANCE", LOGPROB_TOLERANCE)
        yield kept
        for lent in kept.values():
            lent.llm.shutdown()


@pytest.fixture
def build(kept: dict[Any, Lent]) -> engines.Build:
    """Builds engines over the real vLLM."""
    lib = load_library()

    def build(role: Role, limits: engines.Limits) -> Engine:
        override = CONFIG | {
            "max_num_seqs": limits.max_batch_size,
            "max_queue_size": limits.max_queue_size,
            "kv_transfer_config": {"kv_connector_extra_config": {"kv_lease_duration": limits.ttl_s}},
        }
        typed = {"model": str(MODEL)}
        loaded = VLLM_RULES.load(lib.engine_args, role.value, override=json.dumps(override), typed=typed)
        lent = kept.setdefault((role, limits.max_batch_size, limits.ttl_s), Lent())
        lending = dataclasses.replace(lib, llm=Lender(lib, lent))
        return LibraryEngine(VllmAdapter(loaded, lending, read_model_facts(MODEL)))

    return build


build_sampling = build_releasing = build

# All except the one that vLLM does not keep; see `build_guarding` there.
globals().update({name: test for name, test in vars(contract).items() if name.startswith("test_")})
del globals()["test_a_pull_of_kv_that_was_given_back_fails"]


async def test_a_source_that_is_gone_fails_the_handoff_and_its_successor_hands_over(
    build: engines.Build,
) -> None:
    others = descendants(os.getpid())
    doomed, decode = (
        build(Role.PREFILL, engines.Limits(max_batch_size=3)),
        build(Role.DECODE, engines.Limits()),
    )
    await doomed.start()
    own = descendants(os.getpid()) - others
    await decode.start()
    request = ask(40)
    expected = await contract.alone(decode, request)
    assert contract.tokens(await contract.disaggregated(doomed, decode, request)) == expected

    replies = doomed.prefill(request)
    handoff = await next_handoff(replies)
    for pid in own:
        os.kill(pid, signal.SIGKILL)
    await contract.expect(
        HandoffFailed, None, decode.decode(msgspec.structs.replace(request, handoff=handoff))
    )

    await replies.aclose()
    assert await contract.alone(decode, request) == expected
    assert await asyncio.wait_for(doomed.failed(), 20)

    successor = build(Role.PREFILL, engines.Limits(max_batch_size=4))
    await successor.start()
    unknown = ask(prompt(150, seed=7))  # not in decode's cache
    answer = contract.tokens(await contract.disaggregated(successor, decode, unknown))
    assert answer == await contract.alone(decode, unknown)
    await until_idle(decode)
    await asyncio.gather(doomed.stop(), successor.stop(), decode.stop())
