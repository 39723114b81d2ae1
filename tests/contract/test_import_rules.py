from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = (
    "kvbraid", "attention", "prefill_service", "decode_service", "draft_service", "coordinator",
)  # fmt: skip
LINT = Path(sys.executable).with_name("lint-imports")


def lint_imports(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(LINT), "--no-cache"], cwd=directory, capture_output=True, text=True, check=False
    )


def test_import_contracts_are_kept() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout
    assert "Contracts: 8 kept, 0 broken." in done.stdout


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("attention/layout.py", "import kvbraid.errors", "attention imports nothing of ours"),
        ("prefill_service/config.py", "import decode_service.config", "services are independent"),
        ("decode_service/config.py", "import attention.layout", "services never import attention"),
        ("coordinator/config.py", "import kvbraid.model.config", "the coordinator and what it"),
        ("kvbraid/rpc/deadline.py", "import torch", "the coordinator and what it"),
        ("kvbraid/kv/slots.py", "import grpc", "kv, model, speculative and engine know no wire"),
        ("kvbraid/speculative/proposal.py", "import grpc", "kv, model, speculative and engine"),
        ("kvbraid/speculative/proposal.py", "import kvbraid.transport.frame", "the shared package"),
        ("draft_service/config.py", "import decode_service.config", "services are independent"),
        ("kvbraid/engine/scheduler.py", "import kvbraid.v1.info_pb2", "only the edges touch"),
        ("kvbraid/errors.py", "import kvbraid.settings", "the shared package is layered"),
        ("decode_service/worker.py", "import kvbraid.v1.info_pb2", "only the edges touch"),
        ("kvbraid/v1/info_pb2.py", "import kvbraid.errors", "generated stubs import nothing"),
    ],
)
def test_a_forbidden_import_is_noticed(file: str, line: str, contract: str, tmp_path: Path) -> None:
    for name in TOP_LEVEL:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = tmp_path / file
    source.write_text(source.read_text() + f"\n{line}\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(rf"{re.escape(contract)}.* BROKEN", done.stdout), done.stdout


def test_no_other_distribution_provides_our_top_level_names() -> None:
    providers = packages_distributions()
    for name in TOP_LEVEL:
        assert set(providers.get(name, ["kvbraid"])) == {"kvbraid"}, name


@pytest.mark.parametrize(
    "module", ["coordinator", "kvbraid.rpc.server", "kvbraid.settings", "kvbraid.telemetry.metrics"]
)
def test_torch_free_parts_load_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
