"""Engines that run a third-party library: one engine, and what its adapters share."""
