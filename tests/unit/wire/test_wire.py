"""Domain types over the wire and back."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbraid.errors import InvalidRequestError
from kvbraid.request import (
    ChatMessage,
    DraftWindow,
    FinishReason,
    PositionLogprobs,
    RequestRef,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
    Usage,
)
from kvbraid.v1 import decode_pb2, generation_pb2
from kvbraid.wire import (
    chunk_from_proto,
    chunk_to_proto,
    fill_chunk,
    messages_from_proto,
    messages_to_proto,
    ref_from_proto,
    ref_to_proto,
    sampling_from_proto,
    sampling_to_proto,
    usage_from_proto,
    usage_to_proto,
)

ids = st.integers(0, 2**32 - 1)
floats = st.floats(width=32, allow_nan=False)
logprobs = st.builds(TokenLogprob, ids, floats)
samplings = st.builds(
    SamplingParams,
    temperature=floats,
    top_k=st.none() | st.integers(-(2**31), 2**31 - 1),
    top_p=floats,
    min_p=floats,
    seed=st.none() | st.integers(0, 2**64 - 1),
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats,
    logit_bias=st.dictionaries(ids, floats, max_size=4),
    stop_token_ids=st.lists(ids, max_size=4).map(tuple),
    stop=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    max_tokens=st.none() | ids,
    min_tokens=ids,
    top_logprobs=st.none() | ids,
    n=ids,
)
chunks = st.builds(
    TokenChunk,
    st.lists(ids, max_size=4).map(tuple),
    st.lists(
        st.builds(PositionLogprobs, logprobs, st.lists(logprobs, max_size=3).map(tuple)), max_size=3
    ).map(tuple),
    st.none() | st.sampled_from(FinishReason),
    windows=st.lists(st.builds(DraftWindow, ids, ids), max_size=3).map(tuple),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(samplings)
def test_sampling_round_trips(sampling: SamplingParams) -> None:
    sent = sampling_to_proto(sampling).SerializeToString()
    assert sampling_from_proto(generation_pb2.SamplingParams.FromString(sent)) == sampling


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chunks)
def test_chunks_round_trip(chunk: TokenChunk) -> None:
    sent = chunk_to_proto(chunk).SerializeToString()
    assert chunk_from_proto(generation_pb2.TokenChunk.FromString(sent)) == chunk


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chunks)
def test_a_chunk_is_filled_where_it_is(chunk: TokenChunk) -> None:
    response = decode_pb2.DecodeResponse()
    fill_chunk(response.chunk, chunk)
    assert response == decode_pb2.DecodeResponse(chunk=chunk_to_proto(chunk))
    assert response.HasField("chunk")


def test_unset_sampling_fields_take_the_defaults() -> None:
    assert sampling_from_proto(generation_pb2.SamplingParams()) == SamplingParams()


def test_a_zero_that_was_set_is_not_the_default() -> None:
    message = generation_pb2.SamplingParams(temperature=0, top_k=0, top_p=0, max_tokens=0, n=0)
    sampling = sampling_from_proto(message)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 0, 0.0)
    assert (sampling.max_tokens, sampling.n) == (0, 0)


def test_the_domain_type_and_the_message_have_the_same_fields() -> None:
    names = {field.name for field in generation_pb2.SamplingParams.DESCRIPTOR.fields}
    assert names == set(SamplingParams.__dataclass_fields__)


def test_an_unknown_finish_reason_is_refused() -> None:
    message = generation_pb2.TokenChunk()
    message.finish_reason = 99  # type: ignore[assignment]
    with pytest.raises(InvalidRequestError, match="finish_reason is 99"):
        chunk_from_proto(message)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.builds(Usage, ids, ids, ids))
def test_usage_round_trips(usage: Usage) -> None:
    assert usage_from_proto(usage_to_proto(usage)) == usage


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.builds(RequestRef, st.text(max_size=9), ids, st.integers(0, 2**64 - 1)))
def test_refs_round_trip(ref: RequestRef) -> None:
    assert ref_from_proto(ref_to_proto(ref)) == ref


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.builds(ChatMessage, st.text(max_size=5), st.text(max_size=9)), max_size=4))
def test_conversations_round_trip(messages: list[ChatMessage]) -> None:
    assert messages_from_proto(messages_to_proto(messages)) == tuple(messages)
