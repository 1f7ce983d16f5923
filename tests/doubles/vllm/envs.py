"""vLLM's variables: those that name the folder of what it compiles, as far as they are Baton's."""

import os

from vllm.contract import FACTS


def compile_factors() -> dict[str, str | None]:
    names = [*FACTS["compile_factors"]["side_channel"], "VLLM_USE_AOT_COMPILE"]
    return {name: os.environ.get(name) for name in names}
