"""`kvbraid prefill | decode | draft | coordinator`: become that service."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def run(module: str, flags: Sequence[str]) -> int:
    """Replace this process with `python -m module flags`; returns only if that fails."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *flags])
    return 1
