"""Runs the steps of a Dockerfile target in a directory, where there is no container engine.

    python -m tools.replay_dockerfile --target cpu --directory /tmp/image

What a container has by itself is stood in for: the directories of IMAGE_DIRECTORIES lie below one
root, which is at the same path in every stage, so that a virtual environment can be copied between
stages; the base image's `python` is this interpreter, which must be of the image's version. Steps
of SYSTEM_COMMANDS (users, system packages) are skipped and reported.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.dockerfile import Dockerfile, Instruction, Stage, expand, read_dockerfile

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
IMAGE_DIRECTORIES = ("opt", "build", "models", "home")
SYSTEM_COMMANDS = ("groupadd", "useradd", "apt-get")

_ABSOLUTE = re.compile(rf"(?<![\w./$}}-])/(?=(?:{'|'.join(IMAGE_DIRECTORIES)})\b)")
# How this machine reaches package indexes.
_PASSED_ON = re.compile(r"(PIP_(?!NO_CACHE_DIR)\w+|\w+_proxy|\w+_PROXY|SSL_CERT_\w+|HOME)$")
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(slots=True)
class Image:
    """Where the files of a built target are and how it is run."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    directory: str = "/"
    user: str = ""
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)
    stop_signal: str = "SIGTERM"
    labels: dict[str, str] = field(default_factory=dict)


class Replay:
    """One build below `directory`, which must be empty or missing."""

    def __init__(
        self,
        dockerfile: Dockerfile,
        directory: Path,
        *,
        context: Path = ROOT,
        arguments: Mapping[str, str] | None = None,
    ) -> None:
        """context: the folder that COPY reads. arguments: --build-arg."""
        self._dockerfile = dockerfile
        self._context = context
        self._given = dict(arguments or {})
        self._root = directory / "root"
        self._stages = directory / "stages"
        self._stages.mkdir(parents=True)
        self._images: dict[str, Image] = {}
        self._arguments: dict[str, str] = {}
        self.skipped: list[str] = []
        self._python_directory = _python_directory(directory / "python")

    def build(self, target: str) -> Image:
        """Run every stage that `target` needs. Raises CalledProcessError for a step that fails."""
        for stage in self._dockerfile.needed(target):
            image = self._start(stage)
            for item in stage.instructions:
                self._apply(item, image)
            self._images[stage.name] = image
            if stage.name != target:
                self._root.rename(self._stages / stage.name)
        return self._images[target]

    def _start(self, stage: Stage) -> Image:
        self._arguments = {}
        base = self._images.get(stage.base)
        if base is None:
            _check_python(stage.base)
            self._root.mkdir()
            path = f"{self._python_directory}:{_SYSTEM_PATH}"
            return Image(self._root, environment={"PATH": path})
        _link_tree(self._stages / stage.base, self._root)
        inherited = {"environment": dict(base.environment), "labels": dict(base.labels)}
        return Image(
            self._root,
            directory=base.directory,
            user=base.user,
            entrypoint=base.entrypoint,
            command=base.command,
            healthcheck=base.healthcheck,
            stop_signal=base.stop_signal,
            **inherited,
        )

    def _apply(self, item: Instruction, image: Image) -> None:
        here = self._placed(item, image)
        match item.keyword:
            case "ENV":
                image.environment |= here.pairs()
            case "ARG":
                self._arguments |= here.pairs() | _chosen(here.pairs(), self._given)
            case "LABEL":
                image.labels |= here.pairs()
            case "WORKDIR":
                image.directory = here.text
                Path(here.text).mkdir(parents=True, exist_ok=True)
            case "USER":
                image.user = here.text
            case "STOPSIGNAL":
                image.stop_signal = here.text
            case "ENTRYPOINT":
                image.entrypoint = here.words()
            case "CMD":
                image.command = here.words()
            case "HEALTHCHECK":
                image.healthcheck = Instruction("CMD", here.body()[len("CMD ") :], 0).words()
            case "COPY":
                self._copy(here, image)
            case "RUN":
                self._run(here, image)
            case other:
                raise ValueError(f"line {item.line}: {other} is not replayed")

    def _placed(self, item: Instruction, image: Image) -> Instruction:
        """The instruction with this machine's paths; the shell expands the variables of RUN."""
        variables = image.environment | self._arguments
        text = item.text if item.keyword == "RUN" else expand(item.text, variables)
        return Instruction(item.keyword, _ABSOLUTE.sub(f"{self._root}/", text), item.line)

    def _copy(self, item: Instruction, image: Image) -> None:
        *sources, target = item.words()
        stage = item.flags().get("from")
        destination = Path(image.directory, target)
        for source in sources:
            if stage is not None:
                # Placed below the running stage's root; the files are in the finished stage.
                found = self._stages / stage / Path(source).relative_to(self._root)
            else:
                found = self._context / source
            if found.is_dir() and stage is not None:
                _link_tree(found, destination)
            elif found.is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(found, destination, ignore=ignored, dirs_exist_ok=True)
            elif target.endswith("/"):
                _copy_file(found, destination / found.name)
            else:
                _copy_file(found, destination)

    def _run(self, item: Instruction, image: Image) -> None:
        if item.body().split()[0] in SYSTEM_COMMANDS:
            self.skipped.append(item.body())
            return
        outside = {name: text for name, text in os.environ.items() if _PASSED_ON.match(name)}
        subprocess.run(
            ["/bin/sh", "-c", item.body()],
            check=True,
            cwd=image.directory,
            env={**image.environment, **self._arguments, **outside},
        )


def _chosen(declared: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    return {name: given[name] for name in declared if name in given}


def _check_python(base: str) -> None:
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not re.match(rf"python:{re.escape(ours)}\b", base):
        raise ValueError(f"base image {base} is not of this interpreter's version {ours}")


def _python_directory(directory: Path) -> Path:
    """A folder with a `python` that starts this interpreter, without its virtual environment."""
    directory.mkdir()
    program = directory / "python"
    interpreter = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    program.write_text(f'#!/bin/sh\nexec {interpreter} "$@"\n')
    program.chmod(0o755)
    return directory


def _link_tree(source: Path, target: Path) -> None:
    """Hard links: installers replace files, they do not write into them."""
    shutil.copytree(source, target, symlinks=True, copy_function=_link_or_copy, dirs_exist_ok=True)


def _link_or_copy(source: str, target: str) -> str:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
    return target


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def main(argv: Sequence[str] | None = None) -> int:
    """Build one target and say where it is and how it is run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", default="cpu", help="stage to build")
    parser.add_argument("--directory", type=Path, required=True, help="empty folder to build in")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args(argv)
    arguments = dict(pair.split("=", 1) for pair in given.build_arg)
    replay = Replay(read_dockerfile(DOCKERFILE), given.directory, arguments=arguments)
    image = replay.build(given.target)
    print(f"root: {image.root}\nskipped: {replay.skipped}\nenvironment: {image.environment}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
