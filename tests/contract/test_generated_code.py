from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUBS = ROOT / "kvbraid" / "v1"


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir() if p.suffix in (".py", ".pyi")}


def test_committed_stubs_are_what_the_generator_writes(tmp_path: Path) -> None:
    generator = ROOT / "tools" / "gen_protos.py"
    subprocess.run([sys.executable, str(generator), str(tmp_path)], check=True, cwd=ROOT)
    fresh, committed = contents(tmp_path / "kvbraid" / "v1"), contents(STUBS)
    assert sorted(fresh) == sorted(committed)
    stale = [name for name, text in fresh.items() if committed[name] != text]
    assert not stale, "run `make gen-protos`"


def test_every_service_and_call_is_documented_in_the_stubs() -> None:
    for stub in STUBS.glob("*_grpc.py"):
        assert "Missing associated documentation comment" not in stub.read_text(), stub.name
