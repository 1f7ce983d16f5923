"""Engines: one file or folder each, which alone imports the engine's library."""
