"""Ranges of every field: the borders are in, one step beyond is refused with the range."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbraid.errors import InvalidRequestError
from kvbraid.request import SamplingParams
from kvbraid.validation import (
    Limits,
    check_token_ids,
    validate_names,
    validate_prompt,
    validate_sampling,
)
from kvbraid.wire import sampling_from_proto, sampling_to_proto

GOOD: list[tuple[str, Any]] = [
    ("temperature", 0.0), ("temperature", 2.0), ("top_p", 1e-6), ("top_p", 1.0), ("top_k", 1),
    ("top_k", 2**31 - 1), ("top_k", None), ("min_p", 0.0), ("min_p", 1.0),
    ("presence_penalty", -2.0),
    ("presence_penalty", 2.0), ("frequency_penalty", -2.0), ("frequency_penalty", 2.0),
    ("repetition_penalty", 0.01), ("repetition_penalty", 10.0), ("seed", 0), ("seed", 2**64 - 1),
    ("top_logprobs", 0), ("top_logprobs", 20), ("max_draft_tokens", 0), ("max_draft_tokens", 64),
    ("n", 1), ("n", 16), ("max_tokens", 1), ("min_tokens", 0), ("stop", ("x" * 256,)),
    ("stop", ("a",) * 16), ("stop_token_ids", (0, 99)),
    ("logit_bias", {0: -100.0, 99: 100.0}),
]  # fmt: skip
BAD: list[tuple[str, Any, str]] = [
    ("temperature", -1e-6, "0.0 to 2.0"), ("temperature", 2.001, "0.0 to 2.0"),
    ("temperature", float("nan"), "0.0 to 2.0"), ("temperature", float("inf"), "0.0 to 2.0"),
    ("top_p", 0.0, "above 0, up to 1.0"), ("top_p", 1.001, "above 0, up to 1.0"),
    ("top_p", float("nan"), "above 0"), ("top_p", 1e-300, "above 0"),
    ("top_k", 0, "at least 1"), ("top_k", -1, "at least 1"),
    ("top_k", 2**31, f"up to {2**31 - 1}"),
    ("min_p", -0.1, "0.0 to 1.0"), ("min_p", 1.1, "0.0 to 1.0"),
    ("presence_penalty", -2.1, "-2.0 to 2.0"), ("presence_penalty", 2.1, "-2.0 to 2.0"),
    ("frequency_penalty", -2.1, "-2.0 to 2.0"), ("frequency_penalty", 2.1, "-2.0 to 2.0"),
    ("repetition_penalty", 0.0, "0.01 to 10.0"),
    ("repetition_penalty", 10.1, "0.01 to 10.0"), ("seed", -1, f"0 to {2**64 - 1}"),
    ("seed", 2**64, f"0 to {2**64 - 1}"), ("top_logprobs", -1, "0 to 20"),
    ("top_logprobs", 21, "0 to 20"), ("max_draft_tokens", 65, "0 to 64"),
    ("max_draft_tokens", -1, "0 to 64"), ("n", 0, "1 to 16"), ("n", 17, "1 to 16"),
    ("max_tokens", 0, "at least 1"), ("min_tokens", -1, "at least 0"),
    ("stop", ("",), "1 to 256 characters"), ("stop", ("x" * 257,), "1 to 256 characters"),
    ("stop", ("a",) * 17, "at most 16"), ("stop_token_ids", (5, 100), "token ids 0 to 99"),
    ("stop_token_ids", (-1,), "token ids 0 to 99"), ("logit_bias", {100: 0.0}, "token ids 0 to 99"),
    ("logit_bias", {5: 100.1}, "-100.0 to 100.0"), ("logit_bias", {5: -100.1}, "-100.0 to 100.0"),
    ("logit_bias", {5: float("nan")}, "-100.0 to 100.0"),
]  # fmt: skip
LIMITS = Limits(max_model_len=10, vocab_size=100)


@pytest.mark.parametrize(("field", "value"), GOOD)
def test_the_borders_are_accepted(field: str, value: Any) -> None:
    validate_sampling(replace(SamplingParams(), **{field: value}), 100)


@pytest.mark.parametrize(("field", "value"), GOOD)
def test_what_is_accepted_here_is_accepted_by_workers(field: str, value: Any) -> None:
    """Messages have room for it, and it is still in its range when it comes out of one."""
    sent = sampling_to_proto(replace(SamplingParams(), **{field: value}))
    validate_sampling(sampling_from_proto(sent), 100)


@pytest.mark.parametrize(("field", "value", "accepted"), BAD)
def test_what_lies_beyond_is_refused_by_name(field: str, value: Any, accepted: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        validate_sampling(replace(SamplingParams(), **{field: value}), 100)
    assert accepted in str(refusal.value)
    assert str(refusal.value).startswith(field)
    assert (refusal.value.field or "").startswith(field)


def test_every_sampling_field_has_a_bad_value_here() -> None:
    unlimited = {"ignore_eos"}
    assert {field for field, _, _ in BAD} | unlimited == set(SamplingParams.__dataclass_fields__)


def test_max_tokens_defaults_to_the_rest_of_the_context() -> None:
    assert validate_prompt((1, 2, 3), SamplingParams(), LIMITS).max_tokens == 7
    assert validate_prompt((1,) * 9, SamplingParams(), LIMITS).max_tokens == 1
    assert validate_prompt((1,), SamplingParams(max_tokens=9), LIMITS).max_tokens == 9


@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        ((), SamplingParams(), "prompt is empty"),
        ((1,) * 10, SamplingParams(), "prompt has 10 tokens; accepted: 1 to 9"),
        ((1,) * 500, SamplingParams(), "prompt has 500 tokens; accepted: 1 to 9"),
        ((1,), SamplingParams(max_tokens=10), "max_tokens is 10; accepted: 1 to 9"),
        ((1, 100), SamplingParams(), r"prompt\[1\] is 100; accepted: token ids 0 to 99"),
        ((1, -1), SamplingParams(), r"prompt\[1\] is -1; accepted: token ids 0 to 99"),
        ((1,), SamplingParams(min_tokens=10), "min_tokens is 10; accepted: 0 to 9"),
        ((1,), SamplingParams(min_tokens=4, max_tokens=3), "min_tokens is 4; accepted: 0 to 3"),
    ],
)
def test_a_prompt_must_fit(prompt: tuple[int, ...], sampling: SamplingParams, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        validate_prompt(prompt, sampling, LIMITS)


def test_a_worker_may_get_less_max_tokens_than_min_tokens_on_a_retry() -> None:
    validate_sampling(SamplingParams(min_tokens=20, max_tokens=5), 100)


def test_token_ids_are_checked_under_their_fields_name() -> None:
    check_token_ids((0, 99), 100)
    with pytest.raises(InvalidRequestError, match=r"token_ids\[0\] is 100") as refusal:
        check_token_ids((100,), 100)
    assert refusal.value.field == "token_ids"


@pytest.mark.parametrize(
    ("request_id", "salt", "says"),
    [
        ("r" * 129, "", "request_id"),
        ("a\nb", "", "request_id"),
        ("", "s" * 257, "cache_salt has 257"),
    ],
)
def test_names_are_bounded(request_id: str, salt: str, says: str) -> None:
    validate_names("r" * 128, "s" * 256)
    with pytest.raises(InvalidRequestError, match=says):
        validate_names(request_id, salt)
