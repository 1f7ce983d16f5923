"""One engine, one role, one process."""
