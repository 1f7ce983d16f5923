"""vLLM (AsyncLLM, V1) as an engine, its KV handed over by NIXL."""
