"""The package of AsyncLLM and its core."""
