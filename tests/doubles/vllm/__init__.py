"""A double of vLLM: AsyncLLM's API and NIXL's state, with their traps, around the embedded engine."""

from vllm.contract import FACTS

__version__: str = FACTS["version"]
__all__ = ["__version__"]
