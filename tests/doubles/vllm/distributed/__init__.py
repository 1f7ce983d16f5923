"""The package of vLLM's KV connectors."""
