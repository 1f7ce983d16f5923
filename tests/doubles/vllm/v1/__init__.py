"""The package of vLLM's V1 engine."""
