"""Deltas -> OpenAI response objects, whole or as stream chunks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from coordinator.completion import CompletionDelta
from kvbraid.errors import InvalidRequestError, KVBraidError, NotFoundError, OverloadedError
from kvbraid.request import PositionLogprobs, TokenLogprob, Usage
from kvbraid.tokenizer import Tokenizer

# JSON has no infinity; OpenAI writes this for impossible tokens.
_LOWEST_LOGPROB = -9999.0

Json = dict[str, Any]

_ERROR_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


@dataclass(slots=True)
class Choice:
    """One choice of the answer, growing."""

    index: int
    text: str = ""
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None
    text_offset: int = 0

    def add(self, delta: CompletionDelta) -> None:
        """Takes the next delta of this choice."""
        self.text += delta.text
        self.logprobs.extend(delta.chunk.logprobs)
        self.note_finish(delta)

    def note_finish(self, delta: CompletionDelta) -> None:
        """Takes only the end from `delta`: its text went out in a chunk of its own."""
        if delta.chunk.finish_reason is not None:
            self.finish_reason = delta.chunk.finish_reason.value
            self.usage = delta.usage


class Shape(Protocol):
    """How one endpoint writes its objects."""

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """The answer of a request that does not stream."""
        ...

    def opening(self, index: int) -> Json | None:
        """The chunk before the first text of a choice, if there is one."""
        ...

    def chunk(self, choice: Choice, delta: CompletionDelta) -> Json | None:
        """A stream chunk for `delta`, None when there is nothing to say."""
        ...

    def usage_chunk(self, usage: Json) -> Json:
        """The last chunk, when usage was asked for."""
        ...


class _Objects:
    """What all objects of one answer share."""

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer) -> None:
        self._id = request_id
        self._model = model
        self._created = int(time.time())
        self._tokenizer = tokenizer

    def _object(self, kind: str, choices: list[Json], **more: Any) -> Json:
        head = {"id": self._id, "object": kind, "created": self._created, "model": self._model}
        return {**head, "choices": choices, **more}

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", errors="replace")


class ChatShape(_Objects):
    """/v1/chat/completions."""

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(f"chatcmpl-{request_id}", model, tokenizer)

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """See Shape."""
        written = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.logprobs),
                "finish_reason": choice.finish_reason,
            }
            for choice in choices
        ]
        return self._object("chat.completion", written, usage=usage)

    def opening(self, index: int) -> Json | None:
        """See Shape."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, choice: Choice, delta: CompletionDelta) -> Json | None:
        """See Shape."""
        reason = delta.chunk.finish_reason
        logprobs = self._logprobs(delta.chunk.logprobs)
        if not delta.text and logprobs is None and reason is None:
            return None
        content = {"content": delta.text} if delta.text or logprobs else {}
        return self._chunk(choice.index, content, logprobs, reason.value if reason else None)

    def usage_chunk(self, usage: Json) -> Json:
        """See Shape."""
        return self._object("chat.completion.chunk", [], usage=usage)

    def _chunk(self, index: int, delta: Json, logprobs: Json | None, reason: str | None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._object("chat.completion.chunk", [choice])

    def _logprobs(self, entries: Iterable[PositionLogprobs]) -> Json | None:
        content = [
            {
                **self._token(entry.chosen),
                "top_logprobs": [self._token(candidate) for candidate in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None} if content else None

    def _token(self, entry: TokenLogprob) -> Json:
        return {
            "token": self._token_text(entry.token_id),
            "logprob": max(entry.logprob, _LOWEST_LOGPROB),
            "bytes": list(self._tokenizer.token_bytes(entry.token_id)),
        }


class CompletionShape(_Objects):
    """/v1/completions."""

    def __init__(self, request_id: str, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(f"cmpl-{request_id}", model, tokenizer)

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """See Shape."""
        written = [
            self._choice(choice, choice.text, choice.logprobs, choice.finish_reason)
            for choice in choices
        ]
        return self._object("text_completion", written, usage=usage)

    def opening(self, index: int) -> Json | None:
        """See Shape."""
        return None

    def chunk(self, choice: Choice, delta: CompletionDelta) -> Json | None:
        """See Shape."""
        reason = delta.chunk.finish_reason
        if not delta.text and not delta.chunk.logprobs and reason is None:
            return None
        written = self._choice(
            choice, delta.text, delta.chunk.logprobs, reason.value if reason else None
        )
        return self._object("text_completion", [written])

    def usage_chunk(self, usage: Json) -> Json:
        """See Shape."""
        return self._object("text_completion", [], usage=usage)

    def _choice(
        self,
        choice: Choice,
        text: str,
        logprobs: Sequence[PositionLogprobs],
        reason: str | None,
    ) -> Json:
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, logprobs),
            "finish_reason": reason,
        }

    def _logprobs(self, choice: Choice, entries: Sequence[PositionLogprobs]) -> Json | None:
        if not entries:
            return None
        tokens = [self._token_text(entry.chosen.token_id) for entry in entries]
        offsets = []
        for token in tokens:
            offsets.append(choice.text_offset)
            choice.text_offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(e.chosen.logprob, _LOWEST_LOGPROB) for e in entries],
            "top_logprobs": [self._alternatives(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _alternatives(self, entry: PositionLogprobs) -> Json:
        """The chosen token is always among them, as with OpenAI."""
        return {
            self._token_text(candidate.token_id): max(candidate.logprob, _LOWEST_LOGPROB)
            for candidate in (*entry.top, entry.chosen)
        }


def usage_json(per_prompt: Sequence[Sequence[Usage]]) -> Json:
    """Usage over the completions of every prompt; a prompt counts once."""
    num_prompt = sum(usages[0].num_prompt_tokens for usages in per_prompt)
    num_cached = sum(max(u.num_cached_tokens for u in usages) for usages in per_prompt)
    completions = [u for usages in per_prompt for u in usages]
    num_completion = sum(u.num_completion_tokens for u in completions)
    num_accepted = sum(u.num_accepted_tokens for u in completions)
    num_drafts = sum(u.num_draft_tokens for u in completions)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_drafts - num_accepted,
        },
    }


def error_json(error: KVBraidError) -> Json:
    """The body of a refusal."""
    param = error.field if isinstance(error, InvalidRequestError) else None
    code = "model_not_found" if isinstance(error, NotFoundError) else error.reason.lower()
    return error_body(str(error), error.http_status, param=param, code=code)


def error_body(message: str, status: int, *, param: str | None, code: str) -> Json:
    """An error object in OpenAI's shape."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def retry_after_s(error: KVBraidError) -> float | None:
    """When the client may come back, None when that would not help."""
    if isinstance(error, OverloadedError):
        return error.retry_after_s
    return 1.0 if error.http_status == 503 else None
