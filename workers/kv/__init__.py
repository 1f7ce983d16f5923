"""KV cache transceivers of the embedded engine: they move KV bytes between worker processes."""
