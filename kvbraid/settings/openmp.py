"""How long the OpenMP threads of a process that is about to start spin before they sleep."""

from __future__ import annotations

import os
from collections.abc import Mapping

_SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
# libgomp's own count is 300,000 turns, on a core that another process needs.
_BRIEF_SPIN_COUNT = "1000"


def with_brief_spinning(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child that computes in large products and shares its cores.

    libgomp reads it once, when torch loads. A user's own GOMP_SPINCOUNT or OMP_WAIT_POLICY stays.
    environ: None: this process's.
    """
    environ = os.environ if environ is None else environ
    if any(name in environ for name in _SPIN_VARIABLES):
        return dict(environ)
    return {**environ, "GOMP_SPINCOUNT": _BRIEF_SPIN_COUNT}
