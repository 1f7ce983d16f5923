"""The operator's tools, `python -m baton NAME`: status, doctor and download."""
