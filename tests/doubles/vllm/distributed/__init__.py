"""Where vLLM keeps its KV connectors."""
