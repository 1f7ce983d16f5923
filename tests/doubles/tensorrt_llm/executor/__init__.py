"""The double's executor package; results and errors lie below it, as in TensorRT-LLM."""
