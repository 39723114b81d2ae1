"""What a request asks for and what it gets: domain types without protobuf or torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class FinishReason(enum.Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. `kvbraid.validation` holds the accepted ranges."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    top_logprobs: int | None = None
    max_draft_tokens: int | None = None
    n: int = 1

    @property
    def is_greedy(self) -> bool:
        """Temperature 0: the most likely token, no noise."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


class TokenLogprob(NamedTuple):
    """A token id and its natural-log probability."""

    token_id: int
    logprob: float


class PositionLogprobs(NamedTuple):
    """The emitted token and the most likely ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. num_draft_tokens: drafts that were verified;
    num_accepted_tokens: of them, how many came true."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class DraftWindow(NamedTuple):
    """What one step verified of one sequence: draft tokens, 0 of them in a plain step, and how many
    came true."""

    num_drafts: int
    num_accepted: int


_PLAIN_STEP = DraftWindow(0, 0)


class TokenChunk(NamedTuple):
    """Tokens of one engine step of one sequence, or of several that were not told apart;
    `finish_reason` is set on the last.

    windows: one a step, in order; none where no step verified drafts. A step emits a token more
    than came true of its drafts, or as many where the last of these ends the sequence.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    windows: tuple[DraftWindow, ...] = ()

    @property
    def num_drafts(self) -> int:
        """Draft tokens that were verified."""
        return sum(window.num_drafts for window in self.windows)

    @property
    def num_accepted(self) -> int:
        """Of them, how many came true."""
        return sum(window.num_accepted for window in self.windows)

    @property
    def steps(self) -> tuple[DraftWindow, ...]:
        """One window a step, also where none verified drafts."""
        return self.windows or (_PLAIN_STEP,) * len(self.token_ids)

    def followed_by(self, later: TokenChunk) -> TokenChunk:
        """This one, which is not the last, and the next of its sequence as one."""
        return TokenChunk(
            self.token_ids + later.token_ids,
            self.logprobs + later.logprobs,
            later.finish_reason,
            self.steps + later.steps if self.windows or later.windows else (),
        )

    def cut(self, num_tokens: int, finish_reason: FinishReason | None) -> TokenChunk:
        """Its first tokens, which end with `finish_reason`; drafts behind them came true for
        nobody."""
        if num_tokens == len(self.token_ids) and finish_reason is self.finish_reason:
            return self
        windows, num_left = [], num_tokens
        for window in self.windows:
            if num_left <= 0:
                break
            windows.append(window._replace(num_accepted=min(window.num_accepted, num_left)))
            num_left -= window.num_accepted + 1
        return TokenChunk(
            self.token_ids[:num_tokens], self.logprobs[:num_tokens], finish_reason, tuple(windows)
        )


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A validated, tokenised request as the pipeline takes it. The sampling seed is set."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class RequestRef:
    """Who a cross-service message is about."""

    request_id: str
    attempt: int
    sender_incarnation: int
