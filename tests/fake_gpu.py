"""Programs of NVIDIA's driver as scripts: one GPU in use, an MPS that serves nothing, or a recorded node."""

import os
from pathlib import Path

RECORDINGS = Path(__file__).parent / "data/nvidia_smi"
SHAPE_20B = {"model_type": "gpt_oss", "num_hidden_layers": 24}
"""A model's config.json, of which the published weights follow."""
_SMI = """#!/bin/sh
case "$*" in
    *--id*query-gpu=uuid*) echo GPU-1 ;;
    *query-gpu=uuid*) printf 'GPU-%s\\n' {indices} ;;
    *query-gpu*) echo "0, GPU-1, {name}, {total_mib}, {free_mib}" ;;
    *query-compute-apps*) echo "{processes}" ;;
esac
"""
# Like the real one: -f is the daemon, commands come from stdin, and the pipe folder is where they meet.
_MPS = """#!/bin/bash
at=$CUDA_MPS_PIPE_DIRECTORY
if [[ $1 == -f ]]; then
    {daemon}
    echo $$ >"$at/control"
    while [[ ! -e $at/quit ]]; do sleep 0.1; done
    rm -f "$at"/*
    exit 0
fi
read -r command
[[ -e $at/control ]] && kill -0 "$(<"$at/control")" || exit 1
case $command in
    start_server*) echo 4711 >"$at/server" ;;
    get_server_list) cat "$at/server" 2>/dev/null ;;
    quit*) touch "$at/quit" ;;
esac
"""


def install(
    folder: Path,
    *,
    total_gib: float = 80,
    name: str = "NVIDIA H100 80GB HBM3",
    processes: str = "",
    mps: str | None = "",
    num_gpus: int = 1,
) -> dict[str, str]:
    """Environment variables with these programs first on the PATH; `mps`: what its daemon runs first, None:
    there is none."""
    folder.mkdir(exist_ok=True)
    mib = int(total_gib * 1024)
    facts = {"name": name, "total_mib": mib, "free_mib": mib - 512, "processes": processes}
    scripts = {"nvidia-smi": _SMI.format(**facts, indices=" ".join(map(str, range(1, num_gpus + 1))))}
    if mps is not None:
        scripts["nvidia-cuda-mps-control"] = _MPS.format(daemon=mps)
    for program, text in scripts.items():
        (folder / program).write_text(text)
        (folder / program).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def recorded_smi(folder: Path) -> None:
    """Put an nvidia-smi that replays a node of eight B200 into that folder."""
    replay = f"cat {RECORDINGS}/b200x8_query.csv"
    (folder / "nvidia-smi").write_text(f'#!/bin/sh\ncase "$1" in --query-gpu*) {replay} ;; esac\n')
    (folder / "nvidia-smi").chmod(0o755)
