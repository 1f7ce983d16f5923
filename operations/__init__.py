"""The operator's tools, `python -m baton NAME`: status, doctor, why and others."""
