"""The Messages API, as Anthropic defines it."""
