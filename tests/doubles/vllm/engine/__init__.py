"""Where vLLM keeps its engine arguments."""
