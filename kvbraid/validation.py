"""What a request may ask for. Every refusal names the field, the value and what is accepted."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvbraid.errors import InvalidRequestError
from kvbraid.request import SamplingParams

MAX_SEED = 2**64 - 1
MAX_TOP_K = 2**31 - 1
MAX_TOP_LOGPROBS = 20
MAX_DRAFT_TOKENS = 64
MAX_COMPLETIONS = 16
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 4096
MAX_REQUEST_ID_CHARS = 128
MAX_CACHE_SALT_CHARS = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """What the served model takes.

    max_model_len: prompt plus output tokens of one completion. vocab_size: token ids are
    [0, vocab_size).
    """

    max_model_len: int
    vocab_size: int


def validate_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequestError for the first field out of its range.

    That min_tokens fits into max_tokens is `validate_prompt`'s: a worker's max_tokens counts only
    its own attempt.
    """
    _check_real("temperature", sampling.temperature, 0.0, 2.0)
    _check_positive("top_p", sampling.top_p, 1.0)
    _check_real("min_p", sampling.min_p, 0.0, 1.0)
    _check_real("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _check_real("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    # Smaller ones would multiply logits beyond float32.
    _check_real("repetition_penalty", sampling.repetition_penalty, 0.01, 10.0)
    if sampling.top_k is not None and not 1 <= sampling.top_k <= MAX_TOP_K:
        accepted = f"at least 1, up to {MAX_TOP_K}, or unset to keep all tokens"
        raise _refusal("top_k", sampling.top_k, accepted)
    if sampling.seed is not None:
        _check_range("seed", sampling.seed, 0, MAX_SEED)
    if sampling.top_logprobs is not None:
        _check_range("top_logprobs", sampling.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if sampling.max_draft_tokens is not None:
        _check_range("max_draft_tokens", sampling.max_draft_tokens, 0, MAX_DRAFT_TOKENS)
    _check_range("n", sampling.n, 1, MAX_COMPLETIONS)
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise _refusal("max_tokens", sampling.max_tokens, "at least 1")
    if sampling.min_tokens < 0:
        raise _refusal("min_tokens", sampling.min_tokens, "at least 0")
    _check_stops(sampling.stop)
    check_count("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS)
    check_token_ids(sampling.stop_token_ids, vocab_size, field="stop_token_ids")
    check_count("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIASES)
    check_token_ids(tuple(sampling.logit_bias), vocab_size, field="logit_bias")
    for token_id, bias in sampling.logit_bias.items():
        _check_real(f"logit_bias[{token_id}]", bias, -100.0, 100.0)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, *, field: str = "token_ids") -> None:
    """Raises InvalidRequestError when an id is not in the vocabulary."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        index = next(i for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        accepted = f"token ids 0 to {vocab_size - 1}"
        raise _refusal(f"{field}[{index}]", token_ids[index], accepted, field=field)


def check_count(field: str, count: int, most: int) -> None:
    """Raises InvalidRequestError for more than `most` entries."""
    if count > most:
        raise InvalidRequestError(
            f"{field} has {count} entries; accepted: at most {most}", field=field
        )


def validate_prompt(
    prompt_ids: Sequence[int], sampling: SamplingParams, limits: Limits
) -> SamplingParams:
    """Checks the prompt against the model and returns `sampling` with max_tokens set.

    Raises InvalidRequestError when the prompt is empty, holds an unknown id or leaves no room for
    max_tokens (for one token when that is unset).
    """
    if not prompt_ids:
        raise InvalidRequestError("prompt is empty; accepted: at least 1 token", field="prompt")
    check_prompt_length(len(prompt_ids), limits.max_model_len)
    check_token_ids(prompt_ids, limits.vocab_size, field="prompt")
    room = limits.max_model_len - len(prompt_ids)
    if sampling.max_tokens is not None and sampling.max_tokens > room:
        raise InvalidRequestError(
            f"max_tokens is {sampling.max_tokens}; accepted: 1 to {room} with a prompt of "
            f"{len(prompt_ids)} tokens (prompt and output share {limits.max_model_len})",
            field="max_tokens",
        )
    max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
    if sampling.min_tokens > max_tokens:
        raise _refusal("min_tokens", sampling.min_tokens, f"0 to {max_tokens}")
    return replace(sampling, max_tokens=max_tokens)


def check_prompt_length(num_tokens: int, max_model_len: int) -> None:
    """Raises InvalidRequestError when a prompt of so many tokens leaves no room for an output."""
    if num_tokens >= max_model_len:
        raise InvalidRequestError(
            f"prompt has {num_tokens} tokens; accepted: 1 to {max_model_len - 1} "
            f"(prompt and output share {max_model_len})",
            field="prompt",
        )


def validate_names(request_id: str, cache_salt: str) -> None:
    """Raises InvalidRequestError for an id that cannot be logged or a salt that is too long."""
    if len(request_id) > MAX_REQUEST_ID_CHARS or not request_id.isprintable():
        shown = request_id[:MAX_REQUEST_ID_CHARS]
        accepted = f"up to {MAX_REQUEST_ID_CHARS} printable characters"
        raise _refusal("request_id", shown, accepted)
    if len(cache_salt) > MAX_CACHE_SALT_CHARS:
        raise InvalidRequestError(
            f"cache_salt has {len(cache_salt)} characters; accepted: up to {MAX_CACHE_SALT_CHARS}",
            field="cache_salt",
        )


def _check_stops(stops: Sequence[str]) -> None:
    check_count("stop", len(stops), MAX_STOP_STRINGS)
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            accepted = f"1 to {MAX_STOP_CHARS} characters each"
            raise _refusal("stop", stop[:MAX_STOP_CHARS], accepted)


def _check_range(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise _refusal(field, value, f"{low} to {high}")


def _check_real(field: str, value: float, low: float, high: float) -> None:
    """Compares what workers will get: a bound that float32 has not, as 0.01, is accepted too."""
    if not _as_sent(low) <= _as_sent(value) <= _as_sent(high):
        raise _refusal(field, value, f"{low} to {high}")


def _check_positive(field: str, value: float, high: float) -> None:
    sent = _as_sent(value)
    if not (sent > 0.0 and sent <= high and math.isfinite(sent)):
        raise _refusal(field, value, f"above 0, up to {high}")


def _as_sent(value: float) -> float:
    """`value` as messages carry it: as float32."""
    return ctypes.c_float(value).value


def _refusal(
    name: str, value: object, accepted: str, *, field: str | None = None
) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {value!r}; accepted: {accepted}", field=field or name)
