#!/usr/bin/env python3
"""Stands in for a C compiler in the GPU images: hands out modules that were compiled at build time.

Called as Triton calls $CC: SOURCE.c FLAGS -o OUTPUT. The module's name is the hash of its source.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

COMPILED = Path(__file__).resolve().parent / "compiled"


def main(arguments: Sequence[str]) -> int:
    """Copy the compiled module to where the compiler would write it; code 1 when there is none."""
    source = Path(next(word for word in arguments if word.endswith(".c")))
    output = Path(arguments[arguments.index("-o") + 1])
    name = hashlib.sha256(source.read_bytes()).hexdigest()
    module = COMPILED / f"{name}.so"
    if not module.exists():
        known = ", ".join(sorted(path.stem[:12] for path in COMPILED.glob("*.so"))) or "none"
        sys.stderr.write(
            f"{source.name} (sha256 {name[:12]}) was not compiled when this image was built and "
            f"the image has no C compiler; compiled are: {known}\n"
        )
        return 1
    shutil.copyfile(module, output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
