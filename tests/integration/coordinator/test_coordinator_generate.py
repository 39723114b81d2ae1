"""Requests that go well, over gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvbraid.testing import FakeCluster
from kvbraid.v1 import coordinator_pb2, generation_pb2, info_pb2, info_pb2_grpc

PROMPT = tuple(range(100, 140))
STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH


async def test_tokens_and_text_are_the_models_own(stack: Any) -> None:
    answer = await stack.generate()
    expected = stack.expected()
    assert answer.tokens[0] == expected
    assert answer.texts[0] == stack.tokenizer.decode(expected)
    assert answer.last[0].chunk.finish_reason == LENGTH
    usage = answer.last[0].usage
    assert (usage.num_prompt_tokens, usage.num_completion_tokens) == (40, 24)


async def test_a_long_prompt_is_handed_off_and_a_short_one_is_not(start_stack: Any) -> None:
    stack = await start_stack(local_prefill_max_tokens=10)
    assert (await stack.generate(range(20, 31))).tokens[0] == stack.expected(range(20, 31))
    assert (len(stack.cluster.prefill[0].requests), len(stack.cluster.decode[0].requests)) == (1, 1)
    assert (await stack.generate(range(20, 30))).tokens[0] == stack.expected(range(20, 30))
    assert (len(stack.cluster.prefill[0].requests), len(stack.cluster.decode[0].requests)) == (1, 2)
    handoff, local = stack.cluster.decode[0].requests
    assert (handoff.expect_handoff, local.expect_handoff) == (True, False)


async def test_a_prompt_known_to_the_decode_worker_is_not_sent_to_prefill(stack: Any) -> None:
    prompt = tuple(range(100, 100 + 130))
    first = await stack.generate(prompt)
    second = await stack.generate(prompt)
    assert first.tokens == second.tokens
    assert len(stack.cluster.prefill[0].requests) == 1
    assert first.last[0].usage.num_cached_tokens == 0
    assert second.last[0].usage.num_cached_tokens == 128


async def test_cached_tokens_of_a_handoff_are_the_prefill_workers(start_stack: Any) -> None:
    cluster = FakeCluster(num_decode=2)
    stack = await start_stack(cluster, local_prefill_max_tokens=0)
    prompt = tuple(range(100, 100 + 130))
    await stack.generate(prompt)
    second = await stack.generate(prompt)
    assert second.last[0].usage.num_cached_tokens == 128
    assert len(cluster.prefill[0].requests) == 2


async def test_one_token_ends_with_the_prefill_worker(stack: Any) -> None:
    answer = await stack.generate(max_tokens=1)
    assert answer.tokens[0] == stack.expected(max_tokens=1)
    assert answer.last[0].chunk.finish_reason == LENGTH
    await stack.is_idle()


async def test_text_prompts_and_chats_are_tokenised_by_the_model(stack: Any) -> None:
    sampling = generation_pb2.SamplingParams(temperature=0, max_tokens=4)
    plain = coordinator_pb2.GenerateRequest(prompt="Tell me a story " * 8, sampling=sampling)
    chat = coordinator_pb2.GenerateRequest(sampling=sampling)
    chat.chat.messages.add(role="user", content="Who are you?" * 4)
    for request in (plain, chat):
        async for _ in stack.stub.Generate(request, timeout=5):
            pass
    seen = [tuple(request.token_ids) for request in stack.cluster.decode[0].requests]
    rendered = f"<|im_start|>user\n{'Who are you?' * 4}<|im_end|>\n<|im_start|>assistant\n"
    assert seen == [
        tuple(stack.tokenizer.encode("Tell me a story " * 8, add_special_tokens=False)),
        tuple(stack.tokenizer.encode(rendered, add_special_tokens=False)),
    ]


async def test_n_completions_are_independent_and_reproducible(stack: Any) -> None:
    answer = await stack.generate(n=3, temperature=1.0, seed=7)
    for index in range(3):
        expected = stack.expected(index=index, temperature=1.0, seed=7)
        assert answer.tokens[index] == expected
    assert len({tuple(tokens) for tokens in answer.tokens.values()}) == 3


async def test_an_unseeded_request_draws_one_seed_for_both_workers(stack: Any) -> None:
    await stack.generate(temperature=1.0)
    await stack.generate(temperature=1.0)
    decode = [r.sampling.seed for r in stack.cluster.decode[0].requests]
    prefill = [r.sampling.seed for r in stack.cluster.prefill[0].requests]
    assert decode == prefill
    assert len(set(decode)) == 2


async def test_end_tokens_go_to_the_workers_unless_ignored(stack: Any) -> None:
    await stack.generate(stop_token_ids=(77,))
    await stack.generate(stop_token_ids=(77,), ignore_eos=True)
    seen = [tuple(r.sampling.stop_token_ids) for r in stack.cluster.decode[0].requests]
    assert seen == [(77, 2), (77,)]


async def test_a_stop_token_ends_the_text_before_itself(stack: Any) -> None:
    expected = stack.expected()
    answer = await stack.generate(stop_token_ids=(expected[9],))
    assert answer.tokens[0] == expected[:10]
    assert answer.texts[0] == stack.tokenizer.decode(expected[:9])
    assert answer.last[0].chunk.finish_reason == STOP


async def test_a_stop_string_over_several_tokens_cancels_the_decode_worker(stack: Any) -> None:
    expected = stack.expected(max_tokens=400)
    text = stack.tokenizer.decode(expected)
    cut = len(stack.tokenizer.decode(expected[:11])) - 3
    stop = text[cut : cut + 8]
    assert text.index(stop) == cut
    answer = await stack.generate(max_tokens=400, stop=(stop,))
    assert answer.texts[0] == text[:cut]
    assert answer.last[0].chunk.finish_reason == STOP
    assert answer.tokens[0] == expected[: len(answer.tokens[0])]
    assert answer.last[0].usage.num_completion_tokens == len(answer.tokens[0]) < 20
    await stack.is_idle()


async def test_logprobs_come_with_every_token(stack: Any) -> None:
    chunks = [response.chunk async for response in stack.call(top_logprobs=2, max_tokens=5)]
    entries = [entry for chunk in chunks for entry in chunk.logprobs]
    assert [entry.chosen.token_id for entry in entries] == stack.expected(max_tokens=5)
    assert {len(entry.top) for entry in entries} == {2}


async def test_max_tokens_defaults_to_the_room_in_the_context(stack: Any) -> None:
    request = coordinator_pb2.GenerateRequest()
    request.prompt_ids.ids.extend(range(100, 100 + 2000))
    request.sampling.temperature = 0
    tokens = [t async for r in stack.stub.Generate(request, timeout=9) for t in r.chunk.token_ids]
    assert len(tokens) == 2048 - 2000


async def test_the_client_may_name_its_request(stack: Any) -> None:
    request = coordinator_pb2.GenerateRequest(request_id="mine", model="toy")
    request.prompt_ids.ids.extend(PROMPT)
    request.sampling.max_tokens = 2
    ids = {r.request_id async for r in stack.stub.Generate(request, timeout=5)}
    assert ids == {"mine"}
    assert stack.cluster.decode[0].requests[0].ref.request_id == "mine"


async def test_concurrent_requests_do_not_mix(start_stack: Any) -> None:
    stack = await start_stack(FakeCluster(num_prefill=2, num_decode=2))
    prompts = [tuple(range(start, start + 40)) for start in range(10, 42)]
    answers = await asyncio.gather(*(stack.generate(prompt) for prompt in prompts))
    assert [a.tokens[0] for a in answers] == [stack.expected(prompt) for prompt in prompts]
    counts = [worker.num_calls for worker in stack.cluster.decode]
    assert min(counts) >= 8
    await stack.is_idle()


async def test_info_describes_the_coordinator(stack: Any) -> None:
    info = await info_pb2_grpc.InfoServiceStub(stack.channel).Info(
        info_pb2.InfoRequest(), timeout=5
    )
    assert (info.role, info.model, info.max_model_len) == ("coordinator", "toy", 2048)
    assert info.http_address == stack.server.http_address
    assert info.incarnation == stack.server.incarnation


async def test_phases_of_the_time_to_first_token_sum_to_it(stack: Any) -> None:
    for _ in range(3):
        await stack.generate()
    await stack.generate(range(5, 9))
    registry = stack.server.metrics.registry
    total = registry.get_sample_value("kvbraid_coordinator_time_to_first_token_seconds_sum")
    count = registry.get_sample_value("kvbraid_coordinator_time_to_first_token_seconds_count")
    phases = [
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "kvbraid_coordinator_ttft_phase_seconds_sum"
    ]
    assert count == 4
    assert len(phases) >= 3
    assert sum(phases) == pytest.approx(total, rel=1e-6)
