"""vLLM's environment variables that name the compile cache, as far as Baton uses them."""

import os

from vllm.contract import FACTS


def compile_factors() -> dict[str, str]:
    names = [*FACTS["compile_factors"]["side_channel"], "VLLM_USE_AOT_COMPILE"]
    return {name: os.environ[name] for name in names if name in os.environ}
