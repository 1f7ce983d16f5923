"""Harmony, gpt-oss's prompt format: renders conversations, parses answers. No I/O, no engine, no HTTP."""
