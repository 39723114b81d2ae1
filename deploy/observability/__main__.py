"""`python -m deploy.observability [DIR]`: write dashboards and rules below DIR, the repository."""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.observability.files import write_all

ROOT = Path(__file__).resolve().parents[2]

if __name__ == "__main__":
    for path in write_all(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT):
        sys.stdout.write(f"{path}\n")
