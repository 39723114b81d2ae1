"""The example clients, run as a user runs them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"
QUESTION = "What does a cow eat, and where does it live?"


@pytest.mark.parametrize("name", ["grpc_client", "openai_client"])
async def test_an_example_prints_the_answer_and_its_counts(stack: Any, name: str) -> None:
    target = stack.server.address if name == "grpc_client" else stack.server.http_address
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(EXAMPLES / f"{name}.py"),
        target,
        QUESTION,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors.decode()
    text = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    prompt = stack.tokenizer.encode(text, add_special_tokens=False)
    expected = stack.tokenizer.decode(stack.expected(prompt, max_tokens=64))
    answer, _, counts = output.decode().rstrip("\n").rpartition("\n")
    assert answer == expected
    assert counts.startswith(f"[{len(prompt)} prompt + 64 new")
