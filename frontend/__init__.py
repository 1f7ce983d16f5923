"""OpenAI's HTTP API in, token requests out, text back."""
