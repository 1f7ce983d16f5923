"""Where vLLM keeps its V1 engine."""
