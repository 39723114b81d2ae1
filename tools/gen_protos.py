"""Generate kvbraid/v1 from protos/. The only generator; a contract test compares its output."""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
PLUGINS = ("mypy", "mypy_grpc")


def generate(destination: Path) -> None:
    """Write the stubs of every .proto below `destination` (as kvbraid/v1/*_pb2*.py and .pyi).

    Raises RuntimeError with protoc's exit code when a file does not compile.
    """
    protos = sorted(str(p) for p in (ROOT / "protos").rglob("*.proto"))
    code = protoc.main(
        [
            "protoc",
            f"-I{ROOT / 'protos'}",
            # Beside the interpreter, where an inactive virtualenv's PATH would not find them.
            *(f"--plugin=protoc-gen-{name}={BIN / f'protoc-gen-{name}'}" for name in PLUGINS),
            f"--python_out={destination}",
            f"--grpc_python_out={destination}",
            f"--mypy_out={destination}",
            f"--mypy_grpc_out={destination}",
            *protos,
        ]
    )
    if code != 0:
        raise RuntimeError(f"protoc exited with {code}")
    (destination / "kvbraid" / "v1" / "__init__.py").write_text(
        '"""Generated from protos/kvbraid/v1 by tools/gen_protos.py. Never edited."""\n'
    )


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
