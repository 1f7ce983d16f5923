"""TensorRT-LLM behind the `Engine` protocol. Its context and generation are our prefill and decode."""
