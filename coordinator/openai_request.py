"""OpenAI request bodies -> drafts. Unknown and unsupported fields are refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from coordinator.intake import Prompt, RequestDraft
from kvbraid.errors import InvalidRequestError
from kvbraid.request import ChatMessage, SamplingParams
from kvbraid.validation import MAX_LOGIT_BIASES, check_count

_IGNORED = (
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "parallel_tool_calls",
)  # fmt: skip
# Accepted with the one value that means what we do anyway.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "echo": (False,),
    "suffix": ("",),
}


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """A parsed body: one draft a prompt, and how to answer."""

    drafts: tuple[RequestDraft, ...]
    stream: bool
    include_usage: bool


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises InvalidRequestError."""
    try:
        values = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the body is not UTF-8: {error}") from error
    except RecursionError as error:
        raise InvalidRequestError("the body is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidRequestError(f"the body is a JSON {type(values).__name__}, not an object")
    return values


def parse_chat(values: Mapping[str, Any], *, request_id: str) -> OpenAIRequest:
    """A /v1/chat/completions body."""
    fields = _Fields(values)
    prompt = _messages(fields.take("messages"))
    top_logprobs = fields.integer("top_logprobs")
    if fields.flag("logprobs"):
        top_logprobs = top_logprobs or 0
    elif top_logprobs is not None:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", field="top_logprobs")
    max_tokens = _chat_max_tokens(fields)
    sampling = replace(_sampling(fields), max_tokens=max_tokens, top_logprobs=top_logprobs)
    return _finish(fields, (prompt,), sampling, request_id)


def parse_completion(
    values: Mapping[str, Any], *, request_id: str, max_prompts: int
) -> OpenAIRequest:
    """A /v1/completions body."""
    fields = _Fields(values)
    prompts = _prompts(fields.take("prompt"), max_prompts)
    sampling = replace(
        _sampling(fields),
        max_tokens=fields.integer("max_tokens"),
        top_logprobs=fields.integer("logprobs"),
    )
    best_of = fields.integer("best_of")
    if best_of is not None and best_of != sampling.n:
        fields.refuse("best_of", best_of, f"unset, or n ({sampling.n})")
    return _finish(fields, prompts, sampling, request_id)


class _Fields:
    """Takes fields out of a body; null is unset. What is left in the end is refused."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}

    def take(self, name: str) -> Any:
        return self._values.pop(name, None)

    def number(self, name: str, default: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse(name, value, "a number")
        try:
            return float(value)
        except OverflowError:
            self.refuse(name, "a huge number", "a number")

    def integer(self, name: str) -> int | None:
        value = self.take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            self.refuse(name, value, "a whole number")
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, value, "true or false")
        return bool(value)

    def text(self, name: str) -> str:
        value = self.take(name)
        return "" if value is None else _text(name, value)

    def finish(self) -> None:
        for name in _IGNORED:
            self.take(name)
        for name, accepted in _NEUTRAL.items():
            value = self.take(name)
            if value is not None and value not in accepted:
                texts = " or ".join(json.dumps(choice) for choice in accepted)
                self.refuse(name, value, f"unset or {texts}")
        if self._values:
            name = next(iter(self._values))
            raise InvalidRequestError(f"{name[:64]!r} is not a known field", field=name[:64])

    def refuse(self, name: str, value: object, accepted: str) -> NoReturn:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise InvalidRequestError(f"{name} is {shown}; accepted: {accepted}", field=name)


def _sampling(fields: _Fields) -> SamplingParams:
    n = fields.integer("n")
    seed = fields.integer("seed")
    return SamplingParams(
        temperature=fields.number("temperature", 1.0),
        top_k=fields.integer("top_k"),
        max_draft_tokens=fields.integer("max_draft_tokens"),
        top_p=fields.number("top_p", 1.0),
        min_p=fields.number("min_p", 0.0),
        # OpenAI's seeds are signed.
        seed=seed + (1 << 64) if seed is not None and -(1 << 63) <= seed < 0 else seed,
        presence_penalty=fields.number("presence_penalty", 0.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0),
        repetition_penalty=fields.number("repetition_penalty", 1.0),
        logit_bias=_logit_bias(fields),
        stop_token_ids=_token_ids("stop_token_ids", fields.take("stop_token_ids") or []),
        stop=_stops(fields.take("stop")),
        ignore_eos=fields.flag("ignore_eos"),
        min_tokens=fields.integer("min_tokens") or 0,
        n=1 if n is None else n,
    )


def _finish(
    fields: _Fields, prompts: tuple[Prompt, ...], sampling: SamplingParams, request_id: str
) -> OpenAIRequest:
    stream = fields.flag("stream")
    options = fields.take("stream_options")
    if options is not None and not (stream and isinstance(options, dict)):
        fields.refuse("stream_options", options, "an object, with stream true")
    option_fields = _Fields(options or {})
    include_usage = option_fields.flag("include_usage")
    option_fields.take("include_obfuscation")
    option_fields.finish()
    model, cache_salt = fields.text("model"), fields.text("cache_salt")
    fields.finish()
    ids = [request_id] if len(prompts) == 1 else [f"{request_id}-{i}" for i in range(len(prompts))]
    drafts = tuple(
        RequestDraft(prompt, sampling, one_id, model, cache_salt)
        for prompt, one_id in zip(prompts, ids, strict=True)
    )
    return OpenAIRequest(drafts, stream, include_usage)


def _chat_max_tokens(fields: _Fields) -> int | None:
    old, new = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    if old is not None and new is not None and old != new:
        fields.refuse("max_tokens", old, f"unset, or max_completion_tokens ({new})")
    return old if new is None else new


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} is {value!r:.80}; accepted: text", field=name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{name} has half a surrogate pair: {error}", field=name
        ) from error
    return value


def _messages(value: object) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not value:
        raise InvalidRequestError(
            f"messages is {value!r:.80}; accepted: a list of at least 1 message", field="messages"
        )
    return tuple(_message(f"messages[{index}]", message) for index, message in enumerate(value))


def _message(name: str, value: object) -> ChatMessage:
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{name} is {value!r:.80}; accepted: an object", field=name)
    for key, given in value.items():
        if key not in ("role", "content", "name") and given not in (None, [], ""):
            raise InvalidRequestError(
                f"{name}.{key:.64} is not supported", field=f"{name}.{key:.64}"
            )
    role = _text(f"{name}.role", value.get("role"))
    content = value.get("content")
    if isinstance(content, list):
        text = "".join(
            _text_part(f"{name}.content[{index}]", part) for index, part in enumerate(content)
        )
    else:
        text = _text(f"{name}.content", content)
    return ChatMessage("system" if role == "developer" else role, text)


def _text_part(name: str, part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InvalidRequestError(f"{name} is not of type text; accepted: text only", field=name)
    return _text(f"{name}.text", part.get("text"))


def _prompts(value: object, max_prompts: int) -> tuple[Prompt, ...]:
    """A text, a list of texts, token ids, or a list of those."""
    if isinstance(value, list) and value and not _is_id(value[0]):
        if len(value) > max_prompts:
            raise InvalidRequestError(
                f"prompt has {len(value)} entries; accepted: up to {max_prompts}", field="prompt"
            )
        return tuple(_prompt(f"prompt[{index}]", one) for index, one in enumerate(value))
    return (_prompt("prompt", value),)


def _prompt(name: str, value: object) -> Prompt:
    return _token_ids(name, value) if isinstance(value, list) else _text(name, value)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    # A bool is an int too; their types are compared as a prompt may have millions of them.
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise InvalidRequestError(
            f"{name} is {value!r:.80}; accepted: text or a list of token ids", field=name
        )
    return tuple(value)


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    texts = value if isinstance(value, list) else [value]
    return tuple(_text("stop", text) for text in texts)


def _logit_bias(fields: _Fields) -> dict[int, float]:
    value = fields.take("logit_bias")
    if value is None:
        return {}
    if not isinstance(value, dict):
        fields.refuse("logit_bias", value, "an object of token id: bias")
    # Before each is looked at, which for a large body would take seconds.
    check_count("logit_bias", len(value), MAX_LOGIT_BIASES)
    biases = _Fields({f"logit_bias[{key}]": bias for key, bias in value.items()})
    found: dict[int, float] = {}
    for key in value:
        if not key.isascii() or not key.isdigit() or len(key) > 10:
            fields.refuse("logit_bias", key, "token ids as keys")
        found[int(key)] = biases.number(f"logit_bias[{key}]", 0.0)
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
