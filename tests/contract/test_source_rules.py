"""Rules of the source that no linter has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "kvbraid", "attention", "prefill_service", "decode_service", "draft_service", "coordinator",
)  # fmt: skip
FILES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if "v1" not in path.relative_to(ROOT).parts
)

# The RPC boundary and a worker's outermost loop: there any error must become an answer or an end.
BROAD_EXCEPTS = {"kvbraid/rpc/interceptors.py": 1, "kvbraid/worker/engine_thread.py": 1}
# gRPC's own ways to listen and to call: whoever needs one asks there, and gets TLS where it is on.
OPENERS = {"insecure_channel", "secure_channel", "add_insecure_port", "add_secure_port"}
OPENING = "kvbraid/rpc/tls.py"
ENVIRONMENT_READERS = ("kvbraid/settings/", "kvbraid/engine/ranks.py")
VAGUE = re.compile(r"(utils?|common|helpers?|misc|base_\w+|manager\d)$")
MAX_LINES = 500
MAX_KERNEL_LINES = 800
KERNELS = "attention/backends/"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def broad_excepts(tree: ast.Module) -> Iterator[ast.ExceptHandler]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            names = {ast.unparse(item) if item is not None else "" for item in caught}
            if names & {"", "Exception", "BaseException"}:
                yield node


def test_broad_excepts_are_in_two_places_only(trees: dict[str, ast.Module]) -> None:
    found = {name: len(list(broad_excepts(tree))) for name, tree in trees.items()}
    assert {name: count for name, count in found.items() if count} == BROAD_EXCEPTS


def test_environment_is_read_by_settings_and_ranks_only(trees: dict[str, ast.Module]) -> None:
    readers = {
        name
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
    }
    assert [name for name in sorted(readers) if not name.startswith(ENVIRONMENT_READERS)] == []


def test_ports_and_channels_are_opened_in_one_place(trees: dict[str, ast.Module]) -> None:
    users = {
        name
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in OPENERS
    }
    assert users == {OPENING}


def test_no_wait_loses_a_cancellation(trees: dict[str, ast.Module]) -> None:
    """On Python 3.11 asyncio.wait_for loses one that meets the end of the wait: a loop that is
    cancelled then goes on, and whoever stops it waits for ever. asyncio.timeout does not."""
    users = {
        name
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "asyncio.wait_for"
    }
    assert sorted(users) == []


def test_nothing_is_pickled_or_evaluated(trees: dict[str, ast.Module]) -> None:
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                assert (module or "").split(".")[0] not in ("pickle", "marshal", "shelve"), name
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), name


def test_files_are_small() -> None:
    for path in FILES:
        limit = MAX_KERNEL_LINES if name_of(path).startswith(KERNELS) else MAX_LINES
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        assert num_lines <= limit, f"{name_of(path)} has {num_lines} lines, at most {limit}"


def test_names_say_something_and_folders_are_shallow() -> None:
    for path in FILES:
        parts = path.relative_to(ROOT).with_suffix("").parts
        assert len(parts) <= 4, f"{name_of(path)} is more than two folders below its package"
        assert not any(VAGUE.match(part) for part in parts), name_of(path)


def test_every_module_of_substance_says_what_it_is_for(trees: dict[str, ast.Module]) -> None:
    silent = [name for name, tree in trees.items() if tree.body and not ast.get_docstring(tree)]
    assert silent == []


def test_no_unfinished_business_is_left_in_comments() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text), name_of(path)
