"""The operator's tools, `python -m baton`: they ask the frontend, and read settings as the workers do."""
