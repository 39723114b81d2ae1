"""`kvbraid model pull | list | path`."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvbraid.commands.model_path import resolve_model
from kvbraid.commands.progress import ProgressBar
from kvbraid.settings import models_directory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the three actions."""
    actions = parser.add_subparsers(dest="action", required=True)
    pull = actions.add_parser("pull", help="Fetch a model unless it is there already.")
    pull.add_argument("name", help="smollm2-135m-instruct, or a Hugging Face repo id (ORG/NAME)")
    actions.add_parser("list", help="List the models that were pulled, with their size.")
    path = actions.add_parser("path", help="Print where a model lies.")
    path.add_argument("name", help="Name of a pulled model, or a path.")


def run(arguments: argparse.Namespace) -> int:
    """Do the action; results on stdout, progress on stderr."""
    if arguments.action == "pull":
        print(pull_model(arguments.name))
    elif arguments.action == "path":
        print(resolve_model(arguments.name))
    else:
        _list()
    return 0


def pull_model(name: str) -> Path:
    """Fetch `name` with a progress bar on stderr; returns where it lies."""
    from kvbraid.model.pull import pull  # loads torch, which `list` and `path` can do without

    with ProgressBar(f"pulling {name}") as bar:
        return pull(name, models_directory() / name, bar.update)


def _list() -> None:
    directory = models_directory()
    for folder in sorted({path.parent for path in directory.rglob("*") if _is_model_file(path)}):
        size_mb = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6
        print(f"{folder.relative_to(directory).as_posix():40} {size_mb:10.1f} MB  {folder}")


def _is_model_file(path: Path) -> bool:
    return path.name == "config.json" or path.suffix == ".gguf"
