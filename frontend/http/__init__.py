"""HTTP in ASGI terms; knows no API."""
