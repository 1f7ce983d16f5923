"""Changes of private names of vLLM, NIXL and Triton, each with its upstream issue and a switch.

A patch applies to the releases that it was tried with; `BATON_VLLM_WITHOUT=NAME,NAME` turns it off."""

import os

from workers.engines.library.release import release_of

WITHOUT = "BATON_VLLM_WITHOUT"
TRIED = ((0, 25), (0, 26))
NUM_TOKENS = "remote_num_tokens"  # kv_transfer_params: how many tokens the kept KV has

# Decode reads KV out of prefill's GPU memory and goes on after prefill's first token. Without it: NIXL's own
# connector, which posts a descriptor per layer, block and half (https://github.com/vllm-project/vllm/issues/55434).
CONNECTOR = "connector"
# Prefill frees KV when its call is closed. Without it: at the end of its lease
# (https://github.com/vllm-project/vllm/pull/29906).
RELEASE = "release"
# Kernels take their strides as arguments. Without it: they are compiled for every 32 tokens
# (https://github.com/triton-lang/triton/issues/10872).
STRIDES = "strides"
# Starts share compiled code. Without it: each compiles everything again
# (https://github.com/ai-dynamo/dynamo/issues/10695).
COMPILED = "compiled"
# A guess counts if it is what its place draws, so that sampled answers do not depend on what was guessed.
# Without it: rejection sampling, and sampled answers with a draft model do not resume exactly.
DRAWS = "draws"

NAMES = (CONNECTOR, RELEASE, STRIDES, COMPILED, DRAWS)


def turned_off() -> list[str]:
    """The names in the switch, known or not."""
    return [name.strip() for name in os.environ.get(WITHOUT, "").split(",") if name.strip()]


def is_on(name: str, version: str) -> bool:
    """Whether a patch applies to this version of vLLM."""
    return release_of(version) in TRIED and name not in turned_off()
