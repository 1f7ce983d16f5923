"""vLLM (AsyncLLM, V1) as an engine, with KV transfers over NIXL."""
