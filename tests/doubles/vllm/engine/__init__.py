"""The package of vLLM's engine arguments."""
