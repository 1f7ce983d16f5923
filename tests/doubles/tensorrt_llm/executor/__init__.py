"""The double's executor package, with the module layout of TensorRT-LLM."""
