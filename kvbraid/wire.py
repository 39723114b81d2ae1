"""Protobuf messages of requests and tokens <-> domain types, both directions.

KV grants are `kvbraid.transport.wire`'s. Messages are taken as they came: ranges are checked by
`kvbraid.validation`, and only what has no domain value at all is refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from kvbraid.v1 import coordinator_pb2, generation_pb2

_REASON_TO_PROTO = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: generation_pb2.FINISH_REASON_ABORT,
}
_REASON_FROM_PROTO = {number: reason for reason, number in _REASON_TO_PROTO.items()}


def sampling_from_proto(message: generation_pb2.SamplingParams) -> SamplingParams:
    """Unset fields take the defaults of the domain type; the field names are the same."""
    fields: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    for name in ("stop", "stop_token_ids"):
        fields[name] = tuple(fields.get(name, ()))
    fields["logit_bias"] = dict(message.logit_bias)
    return SamplingParams(**fields)


def sampling_to_proto(sampling: SamplingParams) -> generation_pb2.SamplingParams:
    """Every field that has a value is set."""
    return generation_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        stop_token_ids=sampling.stop_token_ids,
        stop=sampling.stop,
        ignore_eos=sampling.ignore_eos,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        top_logprobs=sampling.top_logprobs,
        max_draft_tokens=sampling.max_draft_tokens,
        n=sampling.n,
    )


def chunk_from_proto(message: generation_pb2.TokenChunk) -> TokenChunk:
    """Raises InvalidRequestError for a finish reason that this version does not know."""
    reason = message.finish_reason
    if reason and reason not in _REASON_FROM_PROTO:
        raise InvalidRequestError(f"finish_reason is {reason}", field="finish_reason")
    return TokenChunk(
        tuple(message.token_ids),
        tuple(map(_position_from_proto, message.logprobs)),
        _REASON_FROM_PROTO.get(reason),
        tuple(
            DraftWindow(window.num_draft_tokens, window.num_accepted_tokens)
            for window in message.windows
        ),
    )


def chunk_to_proto(chunk: TokenChunk) -> generation_pb2.TokenChunk:
    """The message of a chunk."""
    message = generation_pb2.TokenChunk()
    fill_chunk(message, chunk)
    return message


def fill_chunk(message: generation_pb2.TokenChunk, chunk: TokenChunk) -> None:
    """Writes `chunk` into an empty message, as the one inside an answer: a finished message would
    be copied into it, for every token."""
    message.token_ids.extend(chunk.token_ids)
    if chunk.logprobs:
        message.logprobs.extend(map(_position_to_proto, chunk.logprobs))
    if chunk.finish_reason is not None:
        message.finish_reason = _REASON_TO_PROTO[chunk.finish_reason]
    for window in chunk.windows:
        message.windows.add(
            num_draft_tokens=window.num_drafts, num_accepted_tokens=window.num_accepted
        )


def _position_from_proto(message: generation_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        chosen=TokenLogprob(message.chosen.token_id, message.chosen.logprob),
        top=tuple(TokenLogprob(entry.token_id, entry.logprob) for entry in message.top),
    )


def _position_to_proto(entry: PositionLogprobs) -> generation_pb2.PositionLogprobs:
    return generation_pb2.PositionLogprobs(
        chosen=_logprob_to_proto(entry.chosen), top=[_logprob_to_proto(top) for top in entry.top]
    )


def _logprob_to_proto(entry: TokenLogprob) -> generation_pb2.TokenLogprob:
    return generation_pb2.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob)


def usage_from_proto(message: generation_pb2.Usage) -> Usage:
    """Token counts."""
    return Usage(
        num_prompt_tokens=message.num_prompt_tokens,
        num_completion_tokens=message.num_completion_tokens,
        num_cached_tokens=message.num_cached_tokens,
        num_draft_tokens=message.num_draft_tokens,
        num_accepted_tokens=message.num_accepted_tokens,
    )


def usage_to_proto(usage: Usage) -> generation_pb2.Usage:
    """Token counts."""
    return generation_pb2.Usage(
        num_prompt_tokens=usage.num_prompt_tokens,
        num_completion_tokens=usage.num_completion_tokens,
        num_cached_tokens=usage.num_cached_tokens,
        num_draft_tokens=usage.num_draft_tokens,
        num_accepted_tokens=usage.num_accepted_tokens,
    )


def ref_from_proto(message: generation_pb2.RequestRef) -> RequestRef:
    """Whose message it is."""
    return RequestRef(message.request_id, message.attempt, message.sender_incarnation)


def ref_to_proto(ref: RequestRef) -> generation_pb2.RequestRef:
    """Whose message it is."""
    return generation_pb2.RequestRef(
        request_id=ref.request_id, attempt=ref.attempt, sender_incarnation=ref.sender_incarnation
    )


def messages_to_proto(messages: Sequence[ChatMessage]) -> coordinator_pb2.ChatMessages:
    """A conversation."""
    return coordinator_pb2.ChatMessages(
        messages=[coordinator_pb2.ChatMessage(role=m.role, content=m.content) for m in messages]
    )


def messages_from_proto(message: coordinator_pb2.ChatMessages) -> tuple[ChatMessage, ...]:
    """A conversation."""
    return tuple(ChatMessage(entry.role, entry.content) for entry in message.messages)
