"""Harmony, gpt-oss's language: conversations to segments, tokens to deltas. No I/O, no engine, no HTTP."""
