"""The worker process: one engine in one role."""
