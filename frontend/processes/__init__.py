"""One frontend in several processes: the supervisor hands out connections; the processes share state."""
