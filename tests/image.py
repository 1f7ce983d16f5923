"""Builds an image of deploy/Dockerfile as a plain folder, from its instructions and pip's packages only."""

import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from tests.fake_gpu import recorded_smi
from tests.stack import ROOT

DOCKERFILE = ROOT / "deploy/Dockerfile"
_SENT = (ROOT / "deploy/Dockerfile.dockerignore").read_text().split()
_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
# Programs of every base image that the launch scripts use.
_PROGRAMS = "bash cat date dirname env head mkdir printenv rm sed seq setsid sh sleep tail"


@dataclass(frozen=True)
class Stage:
    """One stage of the Dockerfile; `steps` are (instruction, rest of the line)."""

    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def stages() -> dict[str, Stage]:
    """The stages by name."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: dict[str, Stage] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, rest = line.split(maxsplit=1)
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = Stage(base)
        elif found:
            list(found.values())[-1].steps.append((instruction, rest))
    return found


def steps_of(name: str) -> Iterator[tuple[str, str]]:
    """The steps of a stage, after those of its base stage."""
    stage = stages()[name]
    if stage.base in stages():
        yield from steps_of(stage.base)
    yield from stage.steps


def environment_of(name: str) -> dict[str, str]:
    """The ENV variables of a stage."""
    pairs = (pair for step, rest in steps_of(name) if step == "ENV" for pair in shlex.split(rest))
    return dict(pair.split("=", 1) for pair in pairs)


class Image:
    """A stage built into `root`; its python3 is a venv with the packages that pip installed.

    Only `root` is on the PATH. Of TensorRT-LLM's release it has the double, the double's packages, an
    nvidia-smi, and an etcd that fails: the release has an etcd, but no NATS server."""

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._site = root / f"usr/lib/{_PYTHON}/site-packages"
        self.workdir = root
        self.command: list[str] = []
        self.environ = {"PATH": f"{root}/usr/bin", "HOME": f"{root}/root", "TMPDIR": f"{root}/tmp"}
        self.environ |= environment_of(name)
        self._put_base()
        if stages()[name].base.startswith("nvcr.io/nvidia/tensorrt-llm/release:"):
            self._put_release()
        for instruction, rest in steps_of(name):
            self._step(instruction, rest)

    def path(self, absolute: str) -> Path:
        """The location of an absolute path of the image."""
        return self._root / absolute.lstrip("/")

    def _put_base(self) -> None:
        for folder in ("usr/bin", "root", "tmp", self._site):
            (self._root / folder).mkdir(parents=True)
        programs = {name: shutil.which(name) for name in _PROGRAMS.split()}
        programs["python3"] = f"{sys.base_prefix}/bin/{_PYTHON}"
        for name, program in programs.items():
            assert program is not None, f"{name} is not on the PATH"
            self.path(f"usr/bin/{name}").symlink_to(program)
        venv = f"home = {sys.base_prefix}/bin\ninclude-system-site-packages = false\n"
        self.path("usr/pyvenv.cfg").write_text(venv)

    def _put_release(self) -> None:
        self._install([*_extra("embedded"), "pydantic"])
        for name in ("tensorrt_llm", "trtllm_contract.json"):
            (self._site / name).symlink_to(ROOT / "tests/doubles" / name)
        self.path("usr/bin/etcd").write_text("#!/bin/sh\nexit 1\n")
        self.path("usr/bin/etcd").chmod(0o755)
        recorded_smi(self.path("usr/bin"))

    def _step(self, instruction: str, rest: str) -> None:
        if instruction == "WORKDIR":
            self.workdir = self.path(rest)
            self.workdir.mkdir(parents=True, exist_ok=True)
        elif instruction == "COPY":
            *sources, target = shlex.split(rest)
            for source in sources:
                self._copy(source, source if target == "./" else target)
        elif instruction == "RUN":
            for command in rest.split("&&"):
                self._run(command.strip())
        elif instruction == "CMD":
            self.command = json.loads(rest)
        else:
            assert instruction in ("ARG", "ENV", "EXPOSE", "USER"), f"{instruction}: not known here"

    def _copy(self, source: str, target: str) -> None:
        assert f"!{source}" in _SENT, f"COPY {source}: Dockerfile.dockerignore keeps it from the build"
        if (ROOT / source).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / source, self.workdir / target, ignore=ignored)
        else:
            shutil.copy2(ROOT / source, self.workdir / target)

    def _run(self, command: str) -> None:
        if found := re.search(r"\bpip install (?:-c (\S+) )?'\.\[([\w,]+)\]'$", command):
            constraints, extras = found.groups()
            assert constraints is None or (self.workdir / constraints).is_file()
            self._pip_install_here(extras.split(","))
        elif command.startswith("rm -rf "):
            for name in command.split()[2:]:
                shutil.rmtree(self.workdir / name)
        elif command.startswith("install -d "):
            self.path(command.rsplit(maxsplit=1)[-1]).mkdir(parents=True)
        else:
            assert command.startswith("useradd "), f"RUN {command}: not known here"

    def _pip_install_here(self, extras: list[str]) -> None:
        """`pip install '.[EXTRAS]'`: the packages in the working directory, as its pyproject.toml says."""
        project = tomllib.loads((self.workdir / "pyproject.toml").read_text())
        for name in (project["project"]["readme"], *project["project"]["license-files"]):
            assert (self.workdir / name).is_file(), f"hatchling wants {name}"
        for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
            shutil.copytree(self.workdir / package, self._site / package)
        name, version = project["project"]["name"], project["project"]["version"]
        record = self._site / f"{name}-{version}.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")
        own = project["project"]["dependencies"]
        self._install([*own, *(line for extra in extras for line in _extra(extra))])

    def _install(self, requirements: Iterable[str]) -> None:
        """Install these packages and their dependencies as links to the ones that the tests use."""
        for name in _closure(requirements):
            for file in metadata.files(name) or ():
                top = self._site / file.parts[0]
                if file.parts[0] not in ("..", "__pycache__") and not top.exists():
                    top.symlink_to(Path(str(metadata.distribution(name).locate_file(file.parts[0]))))


def _extra(name: str) -> list[str]:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found: list[str] = extras[name]
    return found


def _closure(requirements: Iterable[str]) -> set[str]:
    """The names of these packages and all of their installed dependencies."""
    found: set[str] = set()
    waiting = [(Requirement(line), "") for line in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        name, marker = requirement.name, requirement.marker
        if name not in found and (marker is None or marker.evaluate({"extra": extra})):
            found.add(name)
            needed = map(Requirement, metadata.requires(name) or ())
            waiting += [(one, extra) for one in needed for extra in requirement.extras or ("",)]
    return found
