"""The HTTP layer, on ASGI; independent of any API."""
