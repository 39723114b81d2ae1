"""Build step of the GPU images: compiles what Triton would compile at its first launch.

    python compile_launchers.py cuda|rocm DIRECTORY

Triton builds one C module, which loads and launches kernels, with the machine's C compiler and
keeps it in its cache. The image has no compiler: this makes DIRECTORY/<SHA-256 of the source>.so
in a stage that has gcc, and compiled_cc.py answers with it. Kernels themselves need no C compiler.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from triton.runtime.build import _build


def compile_cuda(scratch: Path) -> tuple[str, Path]:
    """Source text and compiled module. An empty libcuda stands in: only its name is linked."""
    from triton.backends.nvidia import driver

    empty = scratch / "empty.c"
    empty.write_text("")
    stub = [str(empty), "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(scratch / "libcuda.so.1")]
    subprocess.run(["gcc", *stub], check=True)
    source = Path(driver.dirname, "driver.c").read_text(encoding="utf-8")
    return source, _compile(source, scratch, driver.include_dirs, driver.libraries)


def compile_rocm(scratch: Path) -> tuple[str, Path]:
    """Source text and compiled module; the path of the HIP library is part of the source."""
    from triton.backends.amd import driver

    library = driver._get_path_to_hip_runtime_dylib()
    source = Path(driver.dirname, "driver.c").read_text(encoding="utf-8")
    source = source.replace("/*py_libhip_search_path*/", library, 1)
    return source, _compile(source, scratch, driver.include_dirs, [])


def _compile(source: str, scratch: Path, include: list[str], libraries: list[str]) -> Path:
    path = scratch / "launcher.c"
    path.write_text(source, encoding="utf-8")
    return Path(_build("launcher", str(path), str(scratch), [str(scratch)], include, libraries, []))


def main(platform: str, directory: Path) -> int:
    """Compile the module of one platform into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        compiler = {"cuda": compile_cuda, "rocm": compile_rocm}[platform]
        source, module = compiler(Path(scratch))
        name = hashlib.sha256(source.encode()).hexdigest()
        (directory / f"{name}.so").write_bytes(module.read_bytes())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
