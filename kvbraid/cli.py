"""The `kvbraid` command. Each command is a module of kvbraid.commands, imported when it is run."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvbraid import __version__
from kvbraid.errors import KVBraidError

# Command -> what `kvbraid --help` says of it.
COMMANDS = {
    "up": "Start prefill and decode workers and a coordinator on this machine.",
    "demo": "Start everything, stream one answer of a real model, show where its KV lies, stop.",
    "generate": "Send one prompt to a running coordinator and stream the answer.",
    "model": "Fetch, list and locate models.",
    "doctor": "Say what this machine offers: versions, cores, attention backends, transports.",
    "bench": "Run a benchmark of the source tree.",
    "prefill": "Run a prefill worker.",
    "decode": "Run a decode worker.",
    "draft": "Run a draft service.",
    "coordinator": "Run a coordinator.",
}
SERVICES = {
    "prefill": "prefill_service",
    "decode": "decode_service",
    "draft": "draft_service",
    "coordinator": "coordinator",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an error of ours is one line on stderr, code 1."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments[0] if arguments else ""
    if name not in COMMANDS:
        return _top_level(arguments)
    try:
        if name in SERVICES:
            run_service = importlib.import_module("kvbraid.commands.service").run
            return int(run_service(SERVICES[name], arguments[1:]))
        return _run(name, arguments[1:])
    except KVBraidError as error:
        sys.stderr.write(f"kvbraid {name}: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _run(name: str, arguments: Sequence[str]) -> int:
    module = importlib.import_module(f"kvbraid.commands.{name}")
    parser = argparse.ArgumentParser(
        prog=f"kvbraid {name}",
        description=COMMANDS[name],
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(arguments)))


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of what has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = action.default not in (None, False, argparse.SUPPRESS, [])
        return super()._get_help_string(action) if has_default else action.help


def _top_level(arguments: Sequence[str]) -> int:
    width = max(map(len, COMMANDS)) + 2
    parser = argparse.ArgumentParser(
        prog="kvbraid",
        description="Long-context language models as separately scaled gRPC services.",
        epilog="commands:\n"
        + "\n".join(f"  {name:{width}}{summary}" for name, summary in COMMANDS.items())
        + "\n\n`kvbraid COMMAND --help` lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="kvbraid [-h] [--version] COMMAND ...",
    )
    parser.add_argument("--version", action="version", version=f"kvbraid {__version__}")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parsed, _ = parser.parse_known_args(arguments)
    if parsed.command is None:
        parser.print_help()
        return 0
    _refuse(parser, parsed.command)


def _refuse(parser: argparse.ArgumentParser, command: str) -> NoReturn:
    parser.error(f"there is no command {command!r}; there are: {', '.join(COMMANDS)}")


if __name__ == "__main__":
    raise SystemExit(main())
