"""The embedded engine's cache transceivers: KV bytes from one worker process to another."""
