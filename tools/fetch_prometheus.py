"""`python -m tools.fetch_prometheus [FOLDER]`: Debian's prometheus and promtool, without root.

The package is pinned by version and SHA-256, downloaded by apt and only unpacked. Where the
machine has no package lists, apt reads the mirror's into a directory of our own first. The
binaries land in FOLDER, by default beside this interpreter, where `installed` looks for them. 19
MB. Without a Debian mirror that has the version, it says so and exits with 0: tests that need the
binaries then skip loudly.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "2.42.0+ds-5+deb12u1"
SHA256 = "81d59a24fce84f7fbe97a45a4f2914b6a5881b5cd1db2a6a0e129e515e1a5f55"
# A mirror that does not answer must not hold up whoever sets up.
_APT_S = 120
BINARIES = ("prometheus", "promtool")
_ARCHITECTURE = "amd64"


def installed(name: str) -> str | None:
    """Path of a binary beside this interpreter or on the PATH; None where it is neither."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


def fetch(folder: Path) -> None:
    """Put the binaries into `folder`.

    Raises subprocess.SubprocessError or FileNotFoundError when apt cannot get the package,
    ValueError when it is not the one that is pinned.
    """
    with tempfile.TemporaryDirectory() as scratch:
        package = _download(Path(scratch))
        found = hashlib.sha256(package.read_bytes()).hexdigest()
        if found != SHA256:
            raise ValueError(f"{package.name} has SHA-256 {found}, pinned is {SHA256}")
        subprocess.run(["dpkg-deb", "-x", package, f"{scratch}/root"], check=True)
        for name in BINARIES:
            partial = folder / f"{name}.partial"
            shutil.copy(f"{scratch}/root/usr/bin/{name}", partial)
            partial.rename(folder / name)


def _download(folder: Path) -> Path:
    """The package in `folder`."""
    command = ["download", f"prometheus:{_ARCHITECTURE}={VERSION}"]
    if _apt(folder, command, check=False) != 0:
        own = [f"-oDir::State={folder}/state", f"-oDir::Cache={folder}/cache"]
        (folder / "state/lists/partial").mkdir(parents=True)
        (folder / "cache/archives/partial").mkdir(parents=True)
        _apt(folder, [*own, "update"], check=True)
        _apt(folder, [*own, *command], check=True)
    (package,) = folder.glob("prometheus_*.deb")
    return package


def _apt(folder: Path, arguments: list[str], *, check: bool) -> int:
    # As root apt would download as another user, who cannot write here.
    apt = ["apt-get", "-qq", "-oAPT::Sandbox::User=root", *arguments]
    return subprocess.run(apt, cwd=folder, check=check, timeout=_APT_S).returncode


def main() -> None:
    """Fetch what is missing."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(sys.executable).parent
    folder.mkdir(parents=True, exist_ok=True)
    if all((folder / name).exists() for name in BINARIES):
        return
    try:
        fetch(folder)
    except (subprocess.SubprocessError, FileNotFoundError) as error:
        sys.stderr.write(
            f"NOT CHECKED from here on: rules and dashboards in Prometheus. Debian's prometheus "
            f"{VERSION} is not to be had: {error}\n"
        )


if __name__ == "__main__":
    main()
