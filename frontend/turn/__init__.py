"""The API-neutral core: one request and the deltas that answer it."""
