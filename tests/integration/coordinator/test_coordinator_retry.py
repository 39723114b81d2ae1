"""Failures that one attempt can have, and what the next one is asked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from kvbraid.errors import (
    DataLossError,
    IncompatibleError,
    InvalidRequestError,
    KVBraidError,
    LeaseLostError,
    UnavailableError,
)
from kvbraid.testing import Fault

pytestmark = pytest.mark.asyncio(loop_scope="module")

RETRIES = "kvbraid_coordinator_retries_total"
RETRYABLE = [
    UnavailableError("rank 1 is gone"),
    LeaseLostError("the lease ran out"),
    DataLossError("a frame was damaged"),
]
DECODE_STAGES = (
    ("arrived", 0),
    ("granted", 0),
    ("start", 0),
    ("token", 0),
    ("token", 1),
    ("token", 9),
)
_prompts = iter(range(10**6))


def raising(error: KVBraidError) -> Callable[[], Awaitable[object]]:
    async def act() -> None:
        raise error

    return act


def new_prompt() -> tuple[int, ...]:
    """A prompt that no test had before, so that no cache knows it."""
    first = 10 + next(_prompts)
    return tuple(range(first, first + 40))


async def check_undisturbed(stack: Any, num_retries: set[int]) -> None:
    """The answer is what it would have been, and everything is free afterwards."""
    prompt = new_prompt()
    before = stack.metric(RETRIES)
    answer = await stack.generate(prompt)
    assert answer.tokens[0] == stack.expected(prompt)
    assert answer.texts[0] == stack.tokenizer.decode(stack.expected(prompt))
    assert answer.last[0].usage.num_completion_tokens == 24
    assert stack.metric(RETRIES) - before in num_retries
    await stack.is_idle()


@pytest.mark.parametrize("stage", ["arrived", "first", "sent"])
@pytest.mark.parametrize("error", RETRYABLE, ids=lambda e: e.reason)
async def test_a_failed_handoff_is_tried_again(
    shared_stack: Any, stage: str, error: KVBraidError
) -> None:
    shared_stack.cluster.prefill[0].faults.append(Fault(stage, raising(error)))
    # When all rows are sent, decoding may have begun: then the failure does not matter.
    await check_undisturbed(shared_stack, {0, 1} if stage == "sent" else {1})


@pytest.mark.parametrize(("stage", "after"), DECODE_STAGES)
@pytest.mark.parametrize("error", RETRYABLE, ids=lambda e: e.reason)
async def test_a_failure_of_the_decode_worker_is_tried_again(
    shared_stack: Any, stage: str, after: int, error: KVBraidError
) -> None:
    shared_stack.cluster.decode[0].faults.append(Fault(stage, raising(error), after))
    await check_undisturbed(shared_stack, {1})


async def test_sampled_tokens_and_text_survive_several_breaks(shared_stack: Any) -> None:
    stack, prompt = shared_stack, new_prompt()
    before = stack.metric(RETRIES)
    for after in (3, 5, 2):
        error = LeaseLostError("again")
        stack.cluster.decode[0].faults.append(Fault("token", raising(error), after))
    sampling = {"temperature": 1.0, "seed": 3, "max_tokens": 40}
    answer = await stack.generate(prompt, **sampling)
    expected = stack.expected(prompt, **sampling)
    assert answer.tokens[0] == expected
    assert answer.texts[0] == stack.tokenizer.decode(expected)
    assert stack.metric(RETRIES) - before == 3


async def test_a_retry_tells_prompt_and_output_apart(shared_stack: Any) -> None:
    stack, prompt = shared_stack, new_prompt()
    stack.cluster.decode[0].faults.append(Fault("token", raising(DataLossError("bad")), 4))
    await stack.generate(prompt, min_tokens=22)
    first, second = stack.cluster.decode[0].requests[-2:]
    emitted = stack.expected(prompt)[:5]
    assert list(second.token_ids) == [*prompt, *emitted]
    assert (first.num_prompt_tokens, second.num_prompt_tokens) == (40, 40)
    assert (first.sampling.max_tokens, second.sampling.max_tokens) == (24, 19)
    assert (first.sampling.min_tokens, second.sampling.min_tokens) == (22, 22)
    assert (first.ref.attempt, second.ref.attempt) == (0, 1)
    assert first.sampling.seed == second.sampling.seed


async def test_the_n_completions_are_retried_one_by_one(shared_stack: Any) -> None:
    stack, prompt = shared_stack, new_prompt()
    before = stack.metric(RETRIES)
    stack.cluster.decode[0].faults.append(Fault("token", raising(DataLossError("bad")), 4))
    sampling = {"n": 3, "temperature": 1.0, "seed": 5}
    answer = await stack.generate(prompt, **sampling)
    for index in range(3):
        assert answer.tokens[index] == stack.expected(prompt, index=index, **sampling)
    assert stack.metric(RETRIES) - before == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequestError("bad"), grpc.StatusCode.INVALID_ARGUMENT),
        (IncompatibleError("other weights"), grpc.StatusCode.FAILED_PRECONDITION),
        (KVBraidError("a bug"), grpc.StatusCode.INTERNAL),
    ],
    ids=["invalid", "incompatible", "internal"],
)
async def test_what_a_retry_cannot_help_is_not_retried(
    shared_stack: Any, error: KVBraidError, code: grpc.StatusCode
) -> None:
    stack, prompt = shared_stack, new_prompt()
    before = stack.cluster.decode[0].num_calls
    stack.cluster.decode[0].faults.append(Fault("arrived", raising(error)))
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await stack.generate(prompt)
    assert failure.value.code() is code
    assert stack.cluster.decode[0].num_calls == before + 1
    assert (await stack.generate(prompt)).tokens[0] == stack.expected(prompt)
