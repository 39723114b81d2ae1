"""Generate the reference pages of docs/. A contract test compares their committed text.

python -m tools.gen_docs [DIRECTORY]
"""

from __future__ import annotations

import sys
from pathlib import Path

from tools.docs_pages.grpc_reference import grpc_reference
from tools.docs_pages.kv_capacity import kv_capacity
from tools.docs_pages.settings_reference import settings_reference

ROOT = Path(__file__).resolve().parent.parent


def reference_pages() -> dict[str, str]:
    """Text of every generated page by its path below docs/."""
    return {
        "reference/configuration.md": settings_reference(),
        "reference/grpc.md": grpc_reference(ROOT / "protos"),
        "reference/kv-capacity.md": kv_capacity(),
    }


if __name__ == "__main__":
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    for name, text in reference_pages().items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
