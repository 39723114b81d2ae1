from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvbraid.cli import main
from kvbraid.commands.generation import generate, read_prompt_ids
from kvbraid.errors import InvalidRequestError, OverloadedError
from kvbraid.rpc.server import RpcServer
from kvbraid.settings import ServerSettings
from kvbraid.telemetry.metrics import CoordinatorMetrics
from kvbraid.v1 import coordinator_pb2, coordinator_pb2_grpc, generation_pb2

STOP = generation_pb2.FINISH_REASON_STOP


class EchoCoordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Answers with what it was asked; refuses a max_tokens of 13."""

    async def Generate(
        self, request: Any, context: Any
    ) -> AsyncIterator[coordinator_pb2.GenerateResponse]:
        if request.sampling.max_tokens == 13:
            raise OverloadedError("no room", retry_after_s=7.0)
        kind = request.WhichOneof("input")
        said = {
            "prompt": request.prompt,
            "chat": "|".join(f"{m.role}:{m.content}" for m in request.chat.messages),
            "prompt_ids": ",".join(map(str, request.prompt_ids.ids)),
        }[kind]
        given = sorted(field.name for field, _ in request.sampling.ListFields())
        yield coordinator_pb2.GenerateResponse(
            chunk=generation_pb2.TokenChunk(token_ids=[5]), text=f"{kind}={said} "
        )
        yield coordinator_pb2.GenerateResponse(
            chunk=generation_pb2.TokenChunk(token_ids=[6, 7], finish_reason=STOP),
            text=" ".join(given) + " ünï",
            usage=generation_pb2.Usage(
                num_prompt_tokens=4, num_completion_tokens=3, num_cached_tokens=2
            ),
        )


@pytest.fixture
async def target() -> AsyncIterator[str]:
    server = RpcServer(
        role="coordinator", settings=ServerSettings(), metrics=CoordinatorMetrics().rpc
    )
    server.add(
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server,
        EchoCoordinator(),
        "kvbraid.v1.CoordinatorService",
    )
    await server.start()
    yield server.address
    await server.stop()


async def kvbraid(*arguments: str) -> subprocess.CompletedProcess[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvbraid.cli",
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUTF8": "1"},
    )
    out, err = await process.communicate()
    return subprocess.CompletedProcess(
        arguments, process.returncode or 0, out.decode(), err.decode()
    )


async def test_json_line_has_tokens_text_reason_usage_and_times(target: str) -> None:
    flags = ("--max-tokens", "8", "--temperature", "0", "--seed", "3", "--json")
    done = await kvbraid("generate", "--target", target, "--prompt", "hi", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["token_ids"] == [5, 6, 7]
    assert answer["text"] == "prompt=hi max_tokens seed temperature ünï"
    assert answer["finish_reason"] == "stop"
    assert (answer["num_prompt_tokens"], answer["num_completion_tokens"]) == (4, 3)
    assert answer["num_cached_tokens"] == 2
    assert 0 < answer["first_token_seconds"] <= answer["seconds"]


async def test_what_is_left_out_is_left_to_the_coordinator(target: str) -> None:
    done = await kvbraid("generate", "--target", target, "--chat", "why?", "--stop", "x")
    assert done.stdout == "chat=user:why? stop ünï\n"


@pytest.mark.parametrize("text", ["[1, 2, 300]", "1 2\n300\n", "1,2,300"])
async def test_prompt_ids_are_read_from_a_file(target: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "ids"
    file.write_text(text)
    assert read_prompt_ids(file) == [1, 2, 300]
    done = await kvbraid("generate", "--target", target, "--prompt-ids", str(file), "--json")
    assert json.loads(done.stdout)["text"].startswith("prompt_ids=1,2,300 ")


@pytest.mark.parametrize("text", ["one two", "[1, 2.5]", '{"a": 1}'])
def test_a_file_of_anything_but_ids_is_refused_by_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    file.write_text(text)
    with pytest.raises(InvalidRequestError, match=r"ids\.json"):
        read_prompt_ids(file)


async def test_text_is_handed_over_piece_by_piece(target: str) -> None:
    pieces: list[str] = []
    request = coordinator_pb2.GenerateRequest(prompt="hi")
    answer = await generate(target, request, timeout_s=10, on_text=pieces.append)
    assert pieces == ["prompt=hi ", " ünï"]
    assert answer.text == "".join(pieces)


async def test_a_refusal_is_one_line_with_the_reason(target: str) -> None:
    request = coordinator_pb2.GenerateRequest(prompt="hi")
    request.sampling.max_tokens = 13
    with pytest.raises(OverloadedError, match="no room") as caught:
        await generate(target, request, timeout_s=10)
    assert caught.value.retry_after_s == 7.0
    done = await kvbraid("generate", "--target", target, "--prompt", "hi", "--max-tokens", "13")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"kvbraid generate: {target}: no room\n"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-tokens", "-1"], "max_tokens is -1"),
        (["--top-k", "10000000000"], "top_k is 10000000000"),
        (["--seed", "-1"], "seed is -1"),
        (["--stop", "\udcff"], "stop is ['\\udcff']"),
    ],
)
def test_what_no_request_has_room_for_is_refused_by_name(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--target", "127.0.0.1:9", "--prompt", "hi", *flags]) == 1
    assert capsys.readouterr().err.startswith(f"kvbraid generate: {says}: ")


@pytest.mark.parametrize("flag", ["--prompt", "--chat"])
def test_text_that_is_not_utf8_is_refused_by_name(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--target", "127.0.0.1:9", flag, "\udcff\udcfe"]) == 1
    assert capsys.readouterr().err.startswith(f"kvbraid generate: {flag[2:]} is ")
