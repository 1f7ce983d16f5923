"""Where vLLM keeps AsyncLLM and what it talks to."""
