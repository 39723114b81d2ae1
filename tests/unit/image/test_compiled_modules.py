"""GPU images have no compiler: Triton must get what the build stage compiled, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[3] / "deploy" / "docker"
# What Triton does at its first launch, up to loading the module, which needs a driver.
FIRST_LAUNCH = """
import sys
from pathlib import Path
from triton.backends.nvidia import driver
from triton.runtime.build import _build
scratch, source = Path(sys.argv[1]), Path(sys.argv[2])
include, libraries = driver.include_dirs, driver.libraries
print(_build("cuda_utils", str(source), str(scratch), [], include, libraries, []))
"""

pytest.importorskip("triton")
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to compile with")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """/opt/kvbraid of an image, with the modules of both platforms."""
    directory = tmp_path_factory.mktemp("image")
    shutil.copy2(DOCKER / "compiled_cc.py", directory)
    hip = directory / "libamdhip64.so"
    hip.touch()
    for platform in ("cuda", "rocm"):
        script = str(DOCKER / "compile_launchers.py")
        result = run(script, platform, str(directory / "compiled"), TRITON_LIBHIP_PATH=str(hip))
        assert result.returncode == 0, result.stderr
    return directory


@needs_gcc
def test_the_first_launch_gets_the_module_without_a_compiler(image: Path, tmp_path: Path) -> None:
    import triton.backends.nvidia as nvidia

    source = Path(nvidia.__path__[0]) / "driver.c"
    compiler = str(image / "compiled_cc.py")
    result = run("-c", FIRST_LAUNCH, str(tmp_path), str(source), CC=compiler)
    assert result.returncode == 0, result.stderr
    module = Path(result.stdout.strip()).read_bytes()
    assert module[:4] == b"\x7fELF"
    assert module in [path.read_bytes() for path in (image / "compiled").glob("*.so")]


@needs_gcc
def test_other_sources_are_refused_with_the_reason(image: Path, tmp_path: Path) -> None:
    source = tmp_path / "other.c"
    source.write_text("int x;")
    compiler = str(image / "compiled_cc.py")
    result = run("-c", FIRST_LAUNCH, str(tmp_path), str(source), CC=compiler)
    assert result.returncode != 0
    assert "other.c" in result.stderr
    assert "has no C compiler" in result.stderr
