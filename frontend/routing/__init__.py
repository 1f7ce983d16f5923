"""Routes token requests to workers, and retries on others when a worker is lost."""
