"""Bad input over both APIs: a clear error that names the field, and the next request is served."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from kvbraid.v1 import coordinator_pb2, generation_pb2

pytestmark = pytest.mark.asyncio(loop_scope="module")

INVALID = grpc.StatusCode.INVALID_ARGUMENT
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
NAN, INFINITY = float("nan"), float("inf")


@dataclass(frozen=True)
class Bad:
    """One kind of bad input.

    sampling: fields of SamplingParams, sent over both APIs. grpc: fields of GenerateRequest.
    http: a body for `path`; raw: its bytes. says: words of the message.
    """

    name: str
    says: tuple[str, ...]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    grpc: Mapping[str, Any] | None = None
    http: Mapping[str, Any] | None = None
    raw: bytes | None = None
    path: str = COMPLETIONS
    code: grpc.StatusCode = INVALID
    status: int = 400


def one(name: str, value: Any, *says: str) -> Bad:
    """A sampling field with a bad value."""
    shown = str(value)[:24].replace(" ", "")
    return Bad(f"{name}={shown}", (name, *says), {name: value})


def chat(role: str, content: str) -> coordinator_pb2.ChatMessages:
    return coordinator_pb2.ChatMessages(
        messages=[coordinator_pb2.ChatMessage(role=role, content=content)]
    )


def ids(*token_ids: int) -> coordinator_pb2.TokenIds:
    return coordinator_pb2.TokenIds(ids=token_ids)


BOTH = [
    one("temperature", -1.0, "-1.0", "0.0 to 2.0"),
    one("temperature", 2.5, "0.0 to 2.0"),
    one("top_p", 0.0, "above 0"),
    one("top_p", 1.5, "up to 1.0"),
    one("top_p", -0.5, "above 0"),
    one("top_k", 0, "at least 1"),
    one("top_k", -7, "at least 1"),
    one("top_p", 1e-46, "above 0"),
    one("min_p", -0.25, "0.0 to 1.0"),
    one("min_p", 1.25, "0.0 to 1.0"),
    one("presence_penalty", 3.0, "-2.0 to 2.0"),
    one("frequency_penalty", -3.0, "-2.0 to 2.0"),
    one("repetition_penalty", 0.0, "0.01 to 10"),
    one("repetition_penalty", 11.0, "0.01 to 10"),
    one("max_tokens", 0, "at least 1"),
    one("max_tokens", 5000, "prompt and output share 2048"),
    one("n", 0, "1 to 16"),
    one("n", 17, "1 to 16"),
    one("stop", [""], "1 to 256 characters"),
    one("stop", ["x" * 257], "1 to 256 characters"),
    one("stop", ["a"] * 17, "17 entries", "at most 16"),
    one("stop_token_ids", [4096], "4096", "0 to 4095"),
    one("stop_token_ids", list(range(257)), "at most 256"),
    one("logit_bias", {4096: 1.0}, "0 to 4095"),
    one("logit_bias", {3: 101.0}, "-100.0 to 100.0"),
    Bad("min_tokens>max_tokens", ("min_tokens", "9"), {"min_tokens": 9, "max_tokens": 4}),
    Bad(
        "prompt empty", ("prompt", "empty"), grpc={"prompt": ""}, http={"prompt": ""},
    ),
    Bad("ids empty", ("prompt", "empty"), grpc={"prompt_ids": ids()}, http={"prompt": []}),
    Bad(
        "id out of range", ("prompt[1]", "4096", "0 to 4095"),
        grpc={"prompt_ids": ids(5, 4096)}, http={"prompt": [5, 4096]},
    ),
    Bad(
        "prompt over the limit", ("2048 tokens", "1 to 2047"),
        grpc={"prompt_ids": ids(*[9] * 2048)}, http={"prompt": [9] * 2048},
    ),
    Bad(
        "text over the limit", ("characters",),
        grpc={"prompt": "a " * 400_000}, http={"prompt": "a " * 400_000},
    ),
    Bad(
        "unknown model", ("'gpt-9'", "'toy'"), grpc={"prompt": "hi", "model": "gpt-9"},
        http={"prompt": "hi", "model": "gpt-9"}, code=grpc.StatusCode.NOT_FOUND, status=404,
    ),
    Bad(
        "chat empty", ("empty", "message"), grpc={"chat": coordinator_pb2.ChatMessages()},
    ),
    Bad(
        "unknown role", ("messages[0].role", "'king'", "system, user, assistant"),
        grpc={"chat": chat("king", "hi")}, path=CHAT,
        http={"messages": [{"role": "king", "content": "hi"}]},
    ),
    Bad(
        "cache_salt too long", ("cache_salt", "up to 256"),
        grpc={"prompt": "hi", "cache_salt": "s" * 257},
        http={"prompt": "hi", "cache_salt": "s" * 257},
    ),
]  # fmt: skip

GRPC_ONLY = [
    one("temperature", NAN, "nan"),
    one("temperature", INFINITY, "inf"),
    one("top_p", NAN, "nan"),
    one("top_logprobs", 21, "0 to 20"),
    one("max_draft_tokens", 65, "0 to 64"),
    Bad("no input", ("input", "prompt, chat, prompt_ids"), grpc={}),
    Bad("request_id too long", ("request_id",), grpc={"prompt": "hi", "request_id": "r" * 129}),
    Bad("request_id unprintable", ("request_id",), grpc={"prompt": "hi", "request_id": "a\nb"}),
]

HTTP_ONLY = [
    Bad("body empty", ("JSON",), raw=b""),
    Bad("body truncated JSON", ("JSON",), raw=b'{"prompt": "hi", "max_'),
    Bad("body not UTF-8", ("UTF-8",), raw=b'{"prompt": "\xff\xfe"}'),
    Bad("body a list", ("list", "object"), raw=b"[1, 2]"),
    Bad("body nested deeply", ("nested",), raw=b'{"prompt": ' + b"[" * 100_000),
    Bad("NaN literal", ("NaN",), raw=b'{"prompt": "hi", "temperature": NaN}'),
    Bad("number of 10000 digits", ("JSON",), raw=b'{"prompt": "hi", "n": ' + b"9" * 10000 + b"}"),
    Bad("infinite number", ("temperature",), raw=b'{"prompt": "hi", "temperature": 1e999}'),
    Bad("half a surrogate pair", ("prompt", "surrogate"), raw=rb'{"prompt": "\ud83d"}'),
    Bad("unknown field", ("'temprature'",), http={"prompt": "hi", "temprature": 1}),
    Bad("no prompt", ("prompt", "text"), http={"max_tokens": 3}),
    Bad("prompt a number", ("prompt", "7"), http={"prompt": 7}),
    Bad("prompt mixed", ("prompt[1]",), http={"prompt": ["a", 5]}),
    Bad("prompt of floats", ("prompt",), http={"prompt": [[1.5, 2]]}),
    Bad("prompt of booleans", ("prompt",), http={"prompt": [True]}),
    Bad("prompt id negative", ("prompt[0]", "-3"), http={"prompt": [-3]}),
    Bad("too many prompts", ("65", "up to 64"), http={"prompt": ["a"] * 65}),
    Bad("temperature text", ("temperature", "'hot'"), http={"prompt": "hi", "temperature": "hot"}),
    Bad("temperature true", ("temperature", "number"), http={"prompt": "hi", "temperature": True}),
    Bad("n fraction", ("n is 1.5", "whole"), http={"prompt": "hi", "n": 1.5}),
    Bad("max_tokens negative", ("max_tokens", "-4"), http={"prompt": "hi", "max_tokens": -4}),
    Bad("min_tokens negative", ("min_tokens", "-4"), http={"prompt": "hi", "min_tokens": -4}),
    Bad("top_k too large", ("top_k", "2147483647"), http={"prompt": "hi", "top_k": 1 << 31}),
    Bad("seed too large", ("seed",), http={"prompt": "hi", "seed": 1 << 64}),
    Bad("logprobs too many", ("0 to 20",), http={"prompt": "hi", "logprobs": 21}),
    Bad("stop a number", ("stop", "text"), http={"prompt": "hi", "stop": 5}),
    Bad("stream text", ("stream", "true or false"), http={"prompt": "hi", "stream": "yes"}),
    Bad("stream_options alone", ("stream_options",), http={"prompt": "hi", "stream_options": {}}),
    Bad(
        "stream_options unknown", ("'fast'",),
        http={"prompt": "hi", "stream": True, "stream_options": {"fast": True}},
    ),
    Bad("logit_bias key", ("logit_bias", "'cat'"), http={"prompt": "hi", "logit_bias": {"cat": 1}}),
    Bad(
        "logit_bias value", ("logit_bias[7]", "True", "number"),
        http={"prompt": "hi", "logit_bias": {"7": True}},
    ),
    Bad(
        "too many biases, before each is looked at", ("logit_bias", "4097 entries"),
        http={"prompt": "hi", "logit_bias": {**dict.fromkeys(map(str, range(4096)), 0), "cat": 1}},
    ),
    Bad("logit_bias list", ("logit_bias",), http={"prompt": "hi", "logit_bias": [1]}),
    Bad("echo", ("echo", "false"), http={"prompt": "hi", "echo": True}),
    Bad("suffix", ("suffix",), http={"prompt": "hi", "suffix": "end"}),
    Bad("best_of", ("best_of",), http={"prompt": "hi", "best_of": 4}),
    Bad("no messages", ("messages",), http={}, path=CHAT),
    Bad("messages empty", ("messages",), http={"messages": []}, path=CHAT),
    Bad("message a text", ("messages[0]",), http={"messages": ["hi"]}, path=CHAT),
    Bad("no role", ("messages[0].role",), http={"messages": [{"content": "a"}]}, path=CHAT),
    Bad("no content", ("messages[0].content",), http={"messages": [{"role": "user"}]}, path=CHAT),
    Bad(
        "an image", ("messages[0].content[0]", "text"), path=CHAT,
        http={"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ),
    Bad(
        "tool calls", ("messages[0].tool_calls",), path=CHAT,
        http={"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]},
    ),
    Bad("tools", ("tools",), http={**HELLO, "tools": [{"type": "function"}]}, path=CHAT),
    Bad(
        "JSON mode", ("response_format",), path=CHAT,
        http={**HELLO, "response_format": {"type": "json_object"}},
    ),
    Bad("top_logprobs alone", ("logprobs",), http={**HELLO, "top_logprobs": 3}, path=CHAT),
    Bad(
        "top_logprobs 21", ("0 to 20",), path=CHAT,
        http={**HELLO, "logprobs": True, "top_logprobs": 21},
    ),
    Bad(
        "two limits", ("max_tokens", "max_completion_tokens"), path=CHAT,
        http={**HELLO, "max_tokens": 4, "max_completion_tokens": 5},
    ),
    Bad(
        "a template of the client's", ("'chat_template'",), path=CHAT,
        http={**HELLO, "chat_template": "{{ ''.__class__.__mro__ }}"},
    ),
]  # fmt: skip


def names(case: Bad) -> str:
    return case.name


async def test_there_are_at_least_forty_kinds_over_each_api() -> None:
    over_grpc = [case for case in BOTH + GRPC_ONLY if case.grpc is not None or case.sampling]
    over_http = [case for case in BOTH + HTTP_ONLY if case.http or case.raw or case.sampling]
    assert min(len(over_grpc), len(over_http)) >= 40


@pytest.mark.parametrize("case", BOTH + GRPC_ONLY, ids=names)
async def test_bad_input_over_grpc(shared_stack: Any, case: Bad) -> None:
    fields = case.grpc if case.grpc is not None else {"prompt_ids": ids(5, 6, 7)}
    sampling = generation_pb2.SamplingParams(**{"temperature": 0, "max_tokens": 2} | case.sampling)
    request = coordinator_pb2.GenerateRequest(sampling=sampling, **fields)
    before = shared_stack.cluster.decode[0].num_calls
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await read(shared_stack.stub.Generate(request, timeout=5))
    assert failure.value.code() is case.code
    message = failure.value.details() or ""
    assert [word for word in case.says if word not in message] == [], message
    assert shared_stack.cluster.decode[0].num_calls == before
    await check_served(shared_stack)


@pytest.mark.parametrize("case", [c for c in BOTH if c.http or c.sampling] + HTTP_ONLY, ids=names)
async def test_bad_input_over_http(shared_stack: Any, case: Bad) -> None:
    body: Any = case.raw
    if body is None:
        fields = case.http if case.http is not None else {"prompt": [5, 6, 7]}
        body = dict(fields) | dict(case.sampling)
    before = shared_stack.cluster.decode[0].num_calls
    status, answer, _ = await shared_stack.post(case.path, body)
    assert status == case.status
    error = answer["error"]
    assert [word for word in case.says if word not in error["message"]] == [], error["message"]
    assert error["type"] in ("invalid_request_error", "not_found_error")
    assert len(error["message"]) < 1000
    assert shared_stack.cluster.decode[0].num_calls == before
    await check_served(shared_stack)


@pytest.mark.parametrize(
    "payload",
    [b"\x1a\x02\xff\xfe", b"\x1a\x50hello", b"\xff" * 64],
    ids=["invalid UTF-8", "truncated", "no message"],
)
async def test_bytes_that_are_no_request(shared_stack: Any, payload: bytes) -> None:
    call = shared_stack.channel.unary_stream("/kvbraid.v1.CoordinatorService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await read(call(payload, timeout=5))
    assert failure.value.code() is INVALID
    assert "GenerateRequest" in str(failure.value.details())
    await check_served(shared_stack)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": "hi", "model": "g" * 100_000}, grpc.StatusCode.NOT_FOUND),
        ({"chat": chat("k" * 100_000, "hi")}, INVALID),
    ],
    ids=["model", "role"],
)
async def test_a_long_name_is_refused_as_what_it_is(
    shared_stack: Any, fields: dict[str, Any], code: grpc.StatusCode
) -> None:
    """The message repeats it, and gRPC has no room for all of it."""
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await read(shared_stack.stub.Generate(coordinator_pb2.GenerateRequest(**fields), timeout=5))
    assert failure.value.code() is code


async def test_an_oversized_message_is_refused(shared_stack: Any) -> None:
    call = shared_stack.channel.unary_stream("/kvbraid.v1.CoordinatorService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await read(call(bytes(18 << 20), timeout=5))
    assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in str(failure.value.details())
    await check_served(shared_stack)


async def test_an_oversized_body_is_refused(shared_stack: Any) -> None:
    status, answer, _ = await shared_stack.post(COMPLETIONS, bytes(17 << 20))
    assert status == 413
    assert "Too Large" in answer["error"]["message"]
    await check_served(shared_stack)


@pytest.mark.parametrize(
    "headers",
    [b"Content-Encoding: gzip\r\nContent-Length: 9", b"Transfer-Encoding: chunked"],
    ids=["no gzip", "no chunks"],
)
async def test_a_body_that_is_not_what_its_headers_say(shared_stack: Any, headers: bytes) -> None:
    host, port = shared_stack.server.http_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    writer.write(head + headers + b"\r\n\r\nnonsense.")
    status, _, body = (await reader.read()).partition(b"\r\n")
    writer.close()
    assert status.endswith(b" 400 Bad Request"), body
    await check_served(shared_stack)


async def test_an_unknown_method_is_unimplemented(shared_stack: Any) -> None:
    call = shared_stack.channel.unary_unary("/kvbraid.v1.CoordinatorService/Guess")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call(b"", timeout=5)
    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", COMPLETIONS, 405), ("POST", "/v1/nothing", 404), ("GET", "/v1/models/other", 404)],
)
async def test_wrong_paths_are_json_errors_too(
    shared_stack: Any, method: str, path: str, status: int
) -> None:
    async with shared_stack.http.request(method, path) as response:
        assert response.status == status
        assert response.headers.get("Allow") == ("POST" if status == 405 else None)
        assert "message" in (await response.json())["error"]


@pytest.mark.parametrize(
    "sent",
    [
        b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"prompt": ',
        b"POST /v1/completions HTTP/1.1\r\nHo",
        b"\x00\x01\x02 not http\r\n\r\n",
        struct.pack(">I", 0xFFFFFFFF) * 200,
    ],
    ids=["truncated body", "truncated head", "garbage", "binary"],
)
async def test_a_broken_http_connection_harms_nobody(shared_stack: Any, sent: bytes) -> None:
    host, port = shared_stack.server.http_address.split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    await writer.drain()
    writer.close()
    await shared_stack.is_idle()
    await check_served(shared_stack)


async def test_a_conversation_cannot_reach_the_template_engine(shared_stack: Any) -> None:
    content = "{{ 7 * 7 }}{% for x in range(99999999) %}{% endfor %}{{ messages.__class__ }}"
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    status, _, _ = await shared_stack.post(CHAT, json.dumps(body))
    assert status == 200
    prompt = shared_stack.cluster.decode[0].requests[-1].token_ids
    assert content in shared_stack.tokenizer.decode(prompt)


async def read(call: Any) -> None:
    async for _ in call:
        pass


async def check_served(stack: Any) -> None:
    answer = await stack.generate((5, 6, 7), max_tokens=2)
    assert answer.tokens[0] == stack.expected((5, 6, 7), max_tokens=2)
