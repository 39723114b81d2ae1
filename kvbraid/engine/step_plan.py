"""What every rank does in one step, as one flat int64 array.

Rank 0 decides and sends; the other ranks decode the array, which gives an equal plan, and all
execute it in the same order. Sequences live in slots: state operations come first, then the compute
batch, then the list of transfers whose progress the ranks report.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbraid.request import SamplingParams

Int64Array = NDArray[np.int64]

_PLAN_VERSION = 3


@dataclass(frozen=True, slots=True)
class Admit:
    """A sequence takes `slot`; its first `num_computed` tokens are in the pool already."""

    slot: int
    sampling: SamplingParams
    key: int
    num_prompt_tokens: int
    num_computed: int
    token_ids: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AddPages:
    """The sequence in `slot` grows by `pages`."""

    slot: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AppendToken:
    """A token that this worker did not sample (a handoff's first) joins the sequence in `slot`."""

    slot: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Release:
    """The sequence in `slot` is gone; its pages may be reused from now on."""

    slot: int


@dataclass(frozen=True, slots=True)
class OpenGrant:
    """Rows of `grant` (its JSON form) may land in the pages of `slot`."""

    slot: int
    grant: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CloseGrant:
    """Rows of this transfer are refused from now on."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class BeginSend:
    """A prompt for `grant` (its JSON form) is queued: the grant's lease is kept from now on."""

    grant: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BindSend:
    """Rows of `slot` are pushed for this transfer as they are computed."""

    slot: int
    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class EndSend:
    """Nothing more is pushed for this transfer and its record is dropped."""

    transfer_id: bytes


@dataclass(frozen=True, slots=True)
class Stop:
    """The engine threads end after this step."""


Operation = (
    Admit
    | AddPages
    | AppendToken
    | Release
    | OpenGrant
    | CloseGrant
    | BeginSend
    | BindSend
    | EndSend
    | Stop
)


@dataclass(frozen=True, slots=True)
class Extend:
    """Compute tokens [start, start + length) of the sequence in `slot`; sample after the last
    when `sample` is set."""

    slot: int
    start: int
    length: int
    sample: bool


@dataclass(frozen=True, slots=True)
class Decode:
    """Compute the newest token of the sequence in `slot` and verify `drafts` behind it."""

    slot: int
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step.

    decodes: sequences that go on from their newest token. extends: chunks of prompts.
    collect: transfers whose progress is gathered from every rank after the compute.
    report_rows: gather the number of finite pool rows and the bytes of every rank.
    taps: the residual stream behind chosen layers is kept for a drafter.
    confirm: the step ends with a barrier, so rank 0 knows that every rank has executed it.
    """

    operations: tuple[Operation, ...] = ()
    decodes: tuple[Decode, ...] = ()
    extends: tuple[Extend, ...] = ()
    collect: tuple[bytes, ...] = field(default=())
    report_rows: bool = False
    confirm: bool = False
    taps: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether no rank has anything to do."""
        return not (
            self.operations
            or self.decodes
            or self.extends
            or self.collect
            or self.report_rows
            or self.confirm
        )

    @property
    def has_compute(self) -> bool:
        """Whether the model runs."""
        return bool(self.decodes or self.extends)

    def encode(self) -> Int64Array:
        """The flat form."""
        words: list[int] = [_PLAN_VERSION, self.report_rows, self.confirm, self.taps]
        words.append(len(self.operations))
        for operation in self.operations:
            _encode_operation(operation, words)
        words.append(len(self.decodes))
        for decode in self.decodes:
            words.append(decode.slot)
            _put(words, decode.drafts)
        words.append(len(self.extends))
        for extend in self.extends:
            words += (extend.slot, extend.start, extend.length, int(extend.sample))
        words.append(len(self.collect))
        for transfer_id in self.collect:
            _put_bytes(words, transfer_id)
        return np.array(words, dtype=np.int64)

    @staticmethod
    def decode(array: Int64Array) -> StepPlan:
        """The plan of a flat form. Raises ValueError for another version."""
        words = iter(array.tolist())
        version = next(words)
        if version != _PLAN_VERSION:
            raise ValueError(f"step plan version {version}, this rank speaks {_PLAN_VERSION}")
        report_rows, confirm, taps = bool(next(words)), bool(next(words)), bool(next(words))
        operations = tuple(_decode_operation(words) for _ in range(next(words)))
        decodes = tuple(Decode(next(words), _take(words)) for _ in range(next(words)))
        extends = tuple(
            Extend(next(words), next(words), next(words), bool(next(words)))
            for _ in range(next(words))
        )
        collect = tuple(_take_bytes(words) for _ in range(next(words)))
        return StepPlan(operations, decodes, extends, collect, report_rows, confirm, taps)


_CODES: dict[type, int] = {
    Admit: 0,
    AddPages: 1,
    AppendToken: 2,
    Release: 3,
    OpenGrant: 4,
    CloseGrant: 5,
    BeginSend: 6,
    EndSend: 7,
    BindSend: 8,
    Stop: 9,
}


# Arguments are read in the order of evaluation, left to right.
_READERS: dict[int, Callable[[Iterator[int]], Operation]] = {
    _CODES[AddPages]: lambda words: AddPages(next(words), _take(words)),
    _CODES[AppendToken]: lambda words: AppendToken(next(words), next(words)),
    _CODES[Release]: lambda words: Release(next(words)),
    _CODES[OpenGrant]: lambda words: OpenGrant(next(words), json.loads(_take_bytes(words))),
    _CODES[CloseGrant]: lambda words: CloseGrant(_take_bytes(words)),
    _CODES[BeginSend]: lambda words: BeginSend(json.loads(_take_bytes(words))),
    _CODES[EndSend]: lambda words: EndSend(_take_bytes(words)),
    _CODES[BindSend]: lambda words: BindSend(next(words), _take_bytes(words)),
    _CODES[Stop]: lambda words: Stop(),
}


def _encode_operation(operation: Operation, words: list[int]) -> None:
    words.append(_CODES[type(operation)])
    match operation:
        case Admit():
            words += (operation.slot, _signed(operation.key))
            words += (operation.num_prompt_tokens, operation.num_computed)
            _put_bytes(words, json.dumps(sampling_to_json(operation.sampling)).encode())
            _put(words, operation.token_ids)
            _put(words, operation.pages)
        case AddPages():
            words.append(operation.slot)
            _put(words, operation.pages)
        case AppendToken():
            words += (operation.slot, operation.token_id)
        case Release():
            words.append(operation.slot)
        case OpenGrant():
            words.append(operation.slot)
            _put_bytes(words, json.dumps(operation.grant).encode())
        case BeginSend():
            _put_bytes(words, json.dumps(operation.grant).encode())
        case BindSend():
            words.append(operation.slot)
            _put_bytes(words, operation.transfer_id)
        case CloseGrant() | EndSend():
            _put_bytes(words, operation.transfer_id)
        case Stop():
            pass


def _decode_operation(words: Iterator[int]) -> Operation:
    code = next(words)
    if code == _CODES[Admit]:
        slot, key = next(words), _unsigned(next(words))
        num_prompt_tokens, num_computed = next(words), next(words)
        sampling = sampling_from_json(json.loads(_take_bytes(words)))
        return Admit(
            slot, sampling, key, num_prompt_tokens, num_computed, _take(words), _take(words)
        )
    reader = _READERS.get(code)
    if reader is not None:
        return reader(words)
    raise ValueError(f"unknown operation {code} in a step plan")


def sampling_to_json(sampling: SamplingParams) -> dict[str, Any]:
    """Plain JSON values of every field."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": [[int(i), float(b)] for i, b in sampling.logit_bias.items()],
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "top_logprobs": sampling.top_logprobs,
        "max_draft_tokens": sampling.max_draft_tokens,
    }


def sampling_from_json(values: dict[str, Any]) -> SamplingParams:
    """The inverse of `sampling_to_json`; stop strings never reach a worker."""
    values = dict(values)
    values["logit_bias"] = {i: b for i, b in values["logit_bias"]}
    values["stop_token_ids"] = tuple(values["stop_token_ids"])
    return SamplingParams(**values)


def _put(words: list[int], values: tuple[int, ...]) -> None:
    words.append(len(values))
    words.extend(values)


def _take(words: Iterator[int]) -> tuple[int, ...]:
    return tuple(islice(words, next(words)))


def _put_bytes(words: list[int], data: bytes) -> None:
    words.append(len(data))
    padded = data + b"\0" * (-len(data) % 8)
    words.extend(np.frombuffer(padded, dtype=np.int64).tolist())


def _take_bytes(words: Iterator[int]) -> bytes:
    length = next(words)
    count = (length + 7) // 8
    return np.fromiter(islice(words, count), dtype=np.int64, count=count).tobytes()[:length]


def _signed(key: int) -> int:
    return key - (1 << 64) if key >= 1 << 63 else key


def _unsigned(word: int) -> int:
    return word % (1 << 64)
