"""An nvidia-smi that replays recordings of a node of eight B200."""

from pathlib import Path

RECORDINGS = Path(__file__).parent / "data/nvidia_smi"


def recorded_smi(folder: Path) -> None:
    """Put it into that folder."""
    script = f"""#!/bin/sh
case "$1" in --query-gpu*) cat {RECORDINGS}/b200x8_query.csv ;; esac
"""
    (folder / "nvidia-smi").write_text(script)
    (folder / "nvidia-smi").chmod(0o755)
