"""The OpenAI-compatible HTTP API, through the same pipeline as gRPC."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from aiohttp import web

from coordinator.completion import CompletionDelta
from coordinator.config import ApiSettings
from coordinator.deadline import ClientWait, Deadline
from coordinator.front import Front
from coordinator.http_server import errors_as_json
from coordinator.merging import merge
from coordinator.openai_request import OpenAIRequest, parse_body, parse_chat, parse_completion
from coordinator.openai_response import (
    ChatShape,
    Choice,
    CompletionShape,
    Json,
    Shape,
    error_json,
    usage_json,
)
from coordinator.registry import Pool, Registry
from kvbraid.errors import InvalidRequestError, KVBraidError
from kvbraid.request import GenerateRequest, Usage
from kvbraid.rpc.admission import Admission
from kvbraid.tokenizer import Tokenizer
from kvbraid.validation import validate_names

_API = "http"
_REQUEST_ID_HEADER = "X-Request-Id"
# A stream that ends with an error has this long to tell its client so.
_LAST_EVENT_S = 5.0


class OpenAIApi:
    """The routes of one coordinator."""

    def __init__(
        self,
        *,
        front: Front,
        registry: Registry,
        tokenizer: Tokenizer,
        settings: ApiSettings,
        admission: Admission,
    ) -> None:
        """admission: requests that generate are counted there, and refused once it is closed."""
        self._front = front
        self._registry = registry
        self._tokenizer = tokenizer
        self._settings = settings
        self._admission = admission
        self._created = int(time.time())

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(
            client_max_size=self._settings.max_http_body_bytes, middlewares=[errors_as_json]
        )
        app.router.add_post("/v1/chat/completions", self.chat_completions)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{model:.+}", self.model)
        app.router.add_get("/health", self.health)
        return app

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        request_id = _request_id(http)
        parsed = parse_chat(parse_body(await _body(http)), request_id=request_id)
        shape = ChatShape(request_id, self._front.intake.model_name, self._tokenizer)
        return await self._answer(http, request_id, parsed, shape)

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        request_id = _request_id(http)
        parsed = parse_completion(
            parse_body(await _body(http)),
            request_id=request_id,
            max_prompts=self._settings.max_prompts_per_request,
        )
        shape = CompletionShape(request_id, self._front.intake.model_name, self._tokenizer)
        return await self._answer(http, request_id, parsed, shape)

    async def models(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/models."""
        name = self._front.intake.model_name
        return web.json_response({"object": "list", "data": [self._model(name)] if name else []})

    async def model(self, http: web.Request) -> web.StreamResponse:
        """GET /v1/models/{model}."""
        self._front.intake.check_model(http.match_info["model"])
        return web.json_response(self._model(http.match_info["model"]))

    async def health(self, http: web.Request) -> web.StreamResponse:
        """GET /health: 200 while requests are taken, 503 otherwise."""
        if self._admission.is_draining:
            return web.json_response({"status": "draining"}, status=503)
        if not self._registry.up(Pool.DECODE):
            why = self._registry.why_none_is_up(Pool.DECODE)
            return web.json_response({"status": "unavailable", "message": why}, status=503)
        return web.json_response({"status": "ok"})

    def _model(self, name: str) -> Json:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "kvbraid"}

    async def _answer(
        self, http: web.Request, request_id: str, parsed: OpenAIRequest, shape: Shape
    ) -> web.StreamResponse:
        deadline = Deadline(self._settings.request_timeout_seconds)
        with self._admission.admitted(http.path), deadline.limited() as wait:
            requests = await self._front.admit(parsed.drafts, _API)
            headers = {_REQUEST_ID_HEADER: request_id} if request_id.isascii() else {}
            choices = [Choice(index) for index in range(sum(r.sampling.n for r in requests))]
            async with aclosing(self._run(requests, deadline)) as deltas:
                if parsed.stream:
                    stream = _EventStream(http, headers, wait)
                    try:
                        return await _stream(stream, deltas, choices, requests, parsed, shape)
                    except ConnectionResetError:
                        # The client has just gone; aiohttp was about to cancel this handler.
                        return stream.abandoned()
                async for delta in deltas:
                    choices[delta.index].add(delta)
            answer = shape.whole(choices, usage_json(_usages(choices, requests)))
            return web.json_response(answer, headers=headers)

    def _run(
        self, requests: Sequence[GenerateRequest], deadline: Deadline
    ) -> AsyncGenerator[CompletionDelta]:
        """Deltas of all prompts; completion j of prompt i is choice i * n + j."""
        first, *others = requests
        streams = [self._front.run(first, deadline, _API)]
        for place, request in enumerate(others, 1):
            stream = self._front.run(request, deadline, _API)
            streams.append(_shifted(stream, place * request.sampling.n))
        return merge(streams)


class _EventStream:
    """Server-sent events. Nothing is sent before the first one, so that an error until then still
    gets its own status code."""

    def __init__(self, http: web.Request, headers: dict[str, str], wait: ClientWait) -> None:
        self._http = http
        self._wait = wait
        self._headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        self._response: web.StreamResponse | None = None

    @property
    def is_open(self) -> bool:
        """Whether the client has seen a status already."""
        return self._response is not None

    async def send(self, value: Json | str) -> None:
        """Writes one event; waits while the client does not read. Raises DeadlineError when that
        takes too long."""
        with self._wait:
            await self._write(value)

    async def _write(self, value: Json | str) -> None:
        if self._response is None:
            self._response = web.StreamResponse(headers=self._headers)
            self._response.content_type = "text/event-stream"
            self._response.charset = "utf-8"
            await self._response.prepare(self._http)
        # ASCII: some clients end lines at U+2028 and U+0085 too, in the middle of a text.
        text = value if isinstance(value, str) else json.dumps(value)
        await self._response.write(f"data: {text}\n\n".encode())

    def abandoned(self) -> web.StreamResponse:
        """What was begun, of which nobody reads the rest."""
        assert self._response is not None
        return self._response

    async def end(self) -> web.StreamResponse:
        """Ends the body. Raises DeadlineError like `send`."""
        assert self._response is not None
        with self._wait:
            await self._response.write_eof()
        return self._response

    async def fail(self, error: KVBraidError) -> web.StreamResponse:
        """Ends the body with `error` and without [DONE], as the status is sent already. A client
        that does not take even that loses its connection."""
        assert self._response is not None
        try:
            async with asyncio.timeout(_LAST_EVENT_S):
                await self._write(error_json(error))
                await self._response.write_eof()
        except TimeoutError:
            if self._http.transport is not None:
                self._http.transport.abort()
        return self._response


async def _stream(
    stream: _EventStream,
    deltas: AsyncGenerator[CompletionDelta],
    choices: Sequence[Choice],
    requests: Sequence[GenerateRequest],
    parsed: OpenAIRequest,
    shape: Shape,
) -> web.StreamResponse:
    opened: set[int] = set()
    try:
        async for delta in deltas:
            choice = choices[delta.index]
            if delta.index not in opened:
                opened.add(delta.index)
                await _send(stream, shape.opening(delta.index), parsed)
            await _send(stream, shape.chunk(choice, delta), parsed)
            choice.note_finish(delta)
        if parsed.include_usage:
            await stream.send(shape.usage_chunk(usage_json(_usages(choices, requests))))
        await stream.send("[DONE]")
        return await stream.end()
    except KVBraidError as error:
        if not stream.is_open:
            raise
        # The workers first: the client may take its time.
        await deltas.aclose()
        return await stream.fail(error)


async def _send(stream: _EventStream, chunk: Json | None, parsed: OpenAIRequest) -> None:
    if chunk is not None:
        await stream.send({**chunk, "usage": None} if parsed.include_usage else chunk)


async def _shifted(
    stream: AsyncGenerator[CompletionDelta], first_index: int
) -> AsyncGenerator[CompletionDelta]:
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            yield replace(delta, index=first_index + delta.index)


def _usages(choices: Sequence[Choice], requests: Sequence[GenerateRequest]) -> list[list[Usage]]:
    n = requests[0].sampling.n
    usages = [choice.usage for choice in choices if choice.usage is not None]
    return [usages[start : start + n] for start in range(0, len(usages), n)]


async def _body(http: web.Request) -> bytes:
    """Raises InvalidRequestError where the body is not encoded as its headers say."""
    try:
        return await http.read()
    except web.RequestPayloadError as error:
        raise InvalidRequestError(f"the body cannot be read: {error}") from error


def _request_id(http: web.Request) -> str:
    request_id = http.headers.get(_REQUEST_ID_HEADER, "") or uuid.uuid4().hex
    validate_names(request_id, "")
    return request_id
