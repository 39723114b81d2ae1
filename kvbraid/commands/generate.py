"""`kvbraid generate`: one prompt to a running coordinator."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvbraid.commands.generation import generate, read_prompt_ids
from kvbraid.commands.tls_flags import add_tls_arguments, tls_of
from kvbraid.errors import InvalidRequestError
from kvbraid.v1 import coordinator_pb2

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags; what is left out takes the coordinator's default."""
    parser.add_argument("--target", required=True, metavar="HOST:PORT", help="coordinator's gRPC")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="plain text, continued as it is")
    prompt.add_argument("--chat", metavar="TEXT", help="a question, put in the chat template")
    prompt.add_argument("--prompt-ids", metavar="FILE", help="token ids: JSON list or numbers")
    unset = argparse.SUPPRESS
    parser.add_argument("--max-tokens", type=int, default=unset, help="tokens [what fits]")
    parser.add_argument("--temperature", type=float, default=unset, help="0 is greedy [1]")
    parser.add_argument("--top-k", type=int, default=unset, help="tokens kept, >= 1 [all]")
    parser.add_argument("--top-p", type=float, default=unset, help="probability kept, (0, 1] [1]")
    parser.add_argument("--min-p", type=float, default=unset, help="of the best one's, [0, 1] [0]")
    parser.add_argument("--seed", type=int, default=unset, help="key of the noise [random]")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends it")
    parser.add_argument("--ignore-eos", action="store_true", help="do not end at end tokens")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for the whole answer")
    parser.add_argument("--json", action="store_true", help="one JSON line instead of the text")
    add_tls_arguments(parser)


def build_request(arguments: argparse.Namespace) -> coordinator_pb2.GenerateRequest:
    """The request the flags describe.

    Raises InvalidRequestError for an unreadable ids file, numbers that no request has room for and
    text that is not UTF-8. Ranges are the coordinator's to check.
    """
    request = coordinator_pb2.GenerateRequest()
    request.sampling.ignore_eos = arguments.ignore_eos
    for name in _SAMPLING:
        if hasattr(arguments, name):
            with _named(name, getattr(arguments, name)):
                setattr(request.sampling, name, getattr(arguments, name))
    with _named("stop", arguments.stop):
        request.sampling.stop.extend(arguments.stop)
    if arguments.prompt is not None:
        with _named("prompt", arguments.prompt):
            request.prompt = arguments.prompt
    elif arguments.chat is not None:
        with _named("chat", arguments.chat):
            request.chat.messages.add(role="user", content=arguments.chat)
    else:
        with _named("prompt_ids", arguments.prompt_ids):
            request.prompt_ids.ids.extend(read_prompt_ids(arguments.prompt_ids))
    return request


@contextmanager
def _named(name: str, value: object) -> Iterator[None]:
    """What protobuf does not take inside the block becomes an error that names it."""
    try:
        yield
    except ValueError as error:  # UnicodeEncodeError too
        raise InvalidRequestError(f"{name} is {value!r:.80}: {error}", field=name) from error


def run(arguments: argparse.Namespace) -> int:
    """Stream the text to stdout, or print one JSON line at the end."""
    on_text = (lambda _: None) if arguments.json else write_text
    answer = asyncio.run(
        generate(
            arguments.target,
            build_request(arguments),
            timeout_s=arguments.timeout,
            on_text=on_text,
            tls=tls_of(arguments),
        )
    )
    print(answer.to_json() if arguments.json else "")
    return 0


def write_text(text: str) -> None:
    """Show a piece of the answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
