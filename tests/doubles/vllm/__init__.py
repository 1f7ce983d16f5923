"""A double of vLLM: AsyncLLM's surface and NIXL's books, traps included, around the embedded engine."""

from vllm.contract import FACTS

__version__: str = FACTS["version"]
__all__ = ["__version__"]
