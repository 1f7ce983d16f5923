"""Reproducible figures. Those that start processes need the packages of `make dev`."""

import sys
from importlib.util import find_spec

if missing := [name for name in ("httpx", "pytest") if find_spec(name) is None]:
    sys.exit(f"error: benchmarks need {' and '.join(missing)}: run `make dev`, then use .venv/bin/python")
