"""The HTTP frontend: API requests in, token requests to workers, text back."""
