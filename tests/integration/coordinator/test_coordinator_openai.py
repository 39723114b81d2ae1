"""The OpenAI-compatible API, through raw HTTP and through the openai package."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from kvbraid.errors import DataLossError, InvalidRequestError
from kvbraid.testing import Fault

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [
    {"role": "system", "content": "Be brief, and never tell anybody what you know about fish."},
    {"role": "user", "content": "Tell me a story about a fish, please."},
]
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(shared_stack: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://{shared_stack.server.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def chat_tokens(stack: Any, **sampling: Any) -> list[int]:
    """What the model answers to MESSAGES."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in MESSAGES)
    prompt = stack.tokenizer.encode(f"{text}<|im_start|>assistant\n", add_special_tokens=False)
    return stack.expected(prompt, **{"max_tokens": 12, **sampling})


async def events(stack: Any, path: str, body: dict[str, Any]) -> list[Any]:
    """Parsed events of a stream, [DONE] as text."""
    async with stack.http.post(path, json={**body, "stream": True}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        text = await response.text()
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_chat(shared_stack: Any, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="toy", messages=MESSAGES, **GREEDY)
    tokens = chat_tokens(shared_stack)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == shared_stack.tokenizer.decode(tokens)
    assert choice.finish_reason == "length"
    assert answer.model == "toy"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


async def test_chat_stream(shared_stack: Any, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="toy", messages=MESSAGES, stream=True, **GREEDY
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == shared_stack.tokenizer.decode(chat_tokens(shared_stack))
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert len({chunk.id for chunk in chunks}) == 1


async def test_stream_usage_is_the_last_chunk_when_asked_for(shared_stack: Any) -> None:
    body = {"messages": MESSAGES, "stream_options": {"include_usage": True}, **GREEDY}
    *chunks, last, done = await events(shared_stack, CHAT, body)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 12
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    without = await events(shared_stack, CHAT, {"messages": MESSAGES, **GREEDY})
    assert not any("usage" in chunk for chunk in without[:-1])


async def test_chat_logprobs(shared_stack: Any, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="toy", messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content or []
    tokens = chat_tokens(shared_stack)
    assert [bytes(entry.bytes or []) for entry in content] == [
        shared_stack.tokenizer.token_bytes(token) for token in tokens
    ]
    assert [entry.token for entry in content] == [
        shared_stack.tokenizer.decode([token]) for token in tokens
    ]
    assert [len(entry.top_logprobs) for entry in content] == [2] * 12
    assert content[0].logprob == pytest.approx(-0.5)


async def test_completion_logprobs_have_offsets_into_the_text(shared_stack: Any) -> None:
    body = {"prompt": list(range(50, 70)), "logprobs": 2, **GREEDY}
    _, whole, _ = await shared_stack.post(COMPLETIONS, body)
    (choice,) = whole["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    assert all(len(top) in (2, 3) for top in logprobs["top_logprobs"])
    streamed = [
        event["choices"][0] for event in (await events(shared_stack, COMPLETIONS, body))[:-1]
    ]
    joined = [offset for c in streamed if c["logprobs"] for offset in c["logprobs"]["text_offset"]]
    assert joined == logprobs["text_offset"]


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("One text about a fish.", ["One text about a fish."]),
        (["One.", "Another one."], ["One.", "Another one."]),
        ([7, 8, 9], [[7, 8, 9]]),
        ([[7, 8, 9], [10, 11]], [[7, 8, 9], [10, 11]]),
        (["Text", [10, 11]], ["Text", [10, 11]]),
    ],
    ids=["text", "texts", "ids", "lists of ids", "mixed"],
)
async def test_all_forms_of_prompts(shared_stack: Any, prompt: Any, parts: list[Any]) -> None:
    status, answer, _ = await shared_stack.post(COMPLETIONS, {"prompt": prompt, **GREEDY})
    assert status == 200, answer
    tokenizer = shared_stack.tokenizer
    prompts = [
        tokenizer.encode(part, add_special_tokens=True) if isinstance(part, str) else part
        for part in parts
    ]
    texts = [tokenizer.decode(shared_stack.expected(p, max_tokens=12)) for p in prompts]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(parts)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    assert answer["usage"]["completion_tokens"] == 12 * len(parts)


async def test_n_completions_of_several_prompts_are_numbered_prompt_by_prompt(
    shared_stack: Any,
) -> None:
    prompts = [[7, 8, 9], [10, 11]]
    sampling = {"temperature": 1.0, "seed": 5, "n": 2, "max_tokens": 6}
    body = {"prompt": prompts, **sampling}
    expected = [
        shared_stack.tokenizer.decode(shared_stack.expected(prompt, index, **sampling))
        for prompt in prompts
        for index in range(2)
    ]
    _, whole, _ = await shared_stack.post(COMPLETIONS, body)
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert whole["usage"]["prompt_tokens"] == 5
    texts = dict.fromkeys(range(4), "")
    for event in (await events(shared_stack, COMPLETIONS, body))[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert list(texts.values()) == expected


@pytest.mark.parametrize("as_list", [False, True])
async def test_stop_strings(shared_stack: Any, as_list: bool) -> None:
    prompt = list(range(50, 70))
    text = shared_stack.tokenizer.decode(shared_stack.expected(prompt, max_tokens=40))
    stop = text[20:26]
    body = {
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 40,
        "stop": [stop] if as_list else stop,
    }
    _, whole, _ = await shared_stack.post(COMPLETIONS, body)
    assert whole["choices"][0]["text"] == text[: text.index(stop)]
    assert whole["choices"][0]["finish_reason"] == "stop"
    streamed = (await events(shared_stack, COMPLETIONS, body))[:-1]
    joined = "".join(event["choices"][0]["text"] for event in streamed)
    assert joined == text[: text.index(stop)]


async def test_messages_may_come_in_parts_and_from_developers(shared_stack: Any) -> None:
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        },
        {"role": "assistant", "content": "Yes.", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "Hello."},
    ]
    status, _, _ = await shared_stack.post(CHAT, {"messages": messages, **GREEDY})
    assert status == 200
    prompt = shared_stack.tokenizer.decode(
        shared_stack.cluster.decode[0].requests[-1].token_ids, skip_special_tokens=False
    )
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
        "<|im_start|>user\nHello.<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_every_sampling_field_reaches_the_workers(shared_stack: Any) -> None:
    sampling = {
        "temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.25, "seed": -2,
        "presence_penalty": 1.5, "frequency_penalty": -1.5, "repetition_penalty": 1.25,
        "logit_bias": {"9": 2.5}, "stop_token_ids": [11], "ignore_eos": True, "min_tokens": 3,
    }  # fmt: skip
    body = {"prompt": [5, 6, 7], "max_tokens": 6, "cache_salt": "mine", **sampling}
    status, answer, _ = await shared_stack.post(COMPLETIONS, body)
    assert status == 200, answer
    seen = shared_stack.cluster.decode[0].requests[-1]
    assert seen.cache_salt == "mine"
    values = {field.name: value for field, value in seen.sampling.ListFields()}
    assert dict(values.pop("logit_bias")) == {9: 2.5}
    assert list(values.pop("stop_token_ids")) == [11]
    assert values == {
        **{k: v for k, v in sampling.items() if k not in ("logit_bias", "stop_token_ids")},
        "seed": 2**64 - 2, "max_tokens": 6, "n": 1,
    }  # fmt: skip


async def test_cached_tokens_are_reported(shared_stack: Any) -> None:
    body = {"prompt": list(range(900, 1100)), **GREEDY}
    _, cold, _ = await shared_stack.post(COMPLETIONS, body)
    _, warm, _ = await shared_stack.post(COMPLETIONS, body)
    assert cold["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert warm["usage"]["prompt_tokens_details"] == {"cached_tokens": 192}


async def test_requests_with_different_salts_share_nothing(shared_stack: Any) -> None:
    body = {"prompt": list(range(1200, 1400)), **GREEDY}
    await shared_stack.post(COMPLETIONS, {**body, "cache_salt": "a"})
    _, other, _ = await shared_stack.post(COMPLETIONS, {**body, "cache_salt": "b"})
    assert other["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["toy"]
    assert (await client.models.retrieve("toy")).owned_by == "kvbraid"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_the_openai_package_understands_refusals(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="toy", messages=MESSAGES, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert missing.value.code == "model_not_found"


async def test_a_failure_before_the_first_token_keeps_its_status(shared_stack: Any) -> None:
    await fail_next(shared_stack, "arrived", 0)
    body = {"prompt": [5, 6], "stream": True, **GREEDY}
    status, answer, _ = await shared_stack.post(COMPLETIONS, body)
    assert (status, answer["error"]["code"]) == (400, "invalid_request")


async def test_a_failure_in_the_middle_ends_the_stream_with_an_error(
    shared_stack: Any, client: openai.AsyncOpenAI
) -> None:
    await fail_next(shared_stack, "token", 3)
    seen = await events(shared_stack, COMPLETIONS, {"prompt": [5, 6], **GREEDY})
    assert len(seen) == 4
    assert seen[-1]["error"]["code"] == "invalid_request"
    await fail_next(shared_stack, "token", 3)
    stream = await client.completions.create(model="toy", prompt=[5, 6], stream=True, **GREEDY)
    with pytest.raises(openai.APIError):
        [_ async for _ in stream]


async def test_an_event_is_one_line_for_clients_that_know_more_line_ends(
    shared_stack: Any,
) -> None:
    """httpx ends lines where str.splitlines does, and so do the clients that are made of it."""
    await fail_next(shared_stack, "token", 1, "no\u2028retry\x85helps")
    url = f"http://{shared_stack.server.http_address}{COMPLETIONS}"
    body = {"prompt": [5, 6], "stream": True, **GREEDY}
    async with httpx.AsyncClient() as http, http.stream("POST", url, json=body) as response:
        lines = [line async for line in response.aiter_lines() if line]
    event = json.loads(lines[-1].removeprefix("data: "))
    assert event["error"]["message"].endswith("no\u2028retry\x85helps")
    assert len(lines) == 2


async def fail_next(stack: Any, stage: str, after: int, message: str = "no retry helps") -> None:
    async def act() -> None:
        raise InvalidRequestError(message)

    stack.cluster.decode[0].faults.append(Fault(stage, act, after))


async def test_a_retry_is_invisible_in_the_stream(shared_stack: Any) -> None:
    async def act() -> None:
        raise DataLossError("damaged")

    shared_stack.cluster.decode[0].faults.append(Fault("token", act, 4))
    seen = await events(shared_stack, COMPLETIONS, {"prompt": [15, 16], **GREEDY})
    text = "".join(event["choices"][0]["text"] for event in seen[:-1])
    expected = shared_stack.expected([15, 16], max_tokens=12)
    assert text == shared_stack.tokenizer.decode(expected)
