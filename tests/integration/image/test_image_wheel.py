"""The Dockerfile's wheel stage, run in a directory: what it makes is the whole project, no more."""

from __future__ import annotations

import tomllib
import zipfile
from pathlib import Path

from tools.replay_dockerfile import DOCKERFILE, ROOT, Replay, read_dockerfile


def test_the_wheel_stage_makes_the_project_and_nothing_else(tmp_path: Path) -> None:
    image = Replay(read_dockerfile(DOCKERFILE), tmp_path / "image").build("wheel")
    (wheel,) = (image.root / "build" / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == set(packages)
    for package in packages:
        for path in (ROOT / package).rglob("*.py"):
            assert path.relative_to(ROOT).as_posix() in names
    assert "kvbraid/py.typed" in names
    assert "kvbraid/v1/coordinator_pb2.pyi" in names
