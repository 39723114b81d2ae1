"""Stops speculation where it does not pay, as a whole and for a request, and probes to resume.

The account of the whole is kept in plain steps, i.e. in what a step without drafts costs at the
same number of sequences. A step that drafted for B sequences and emitted n tokens earns

    n / B - (draft seconds + step seconds) / plain seconds

which is negative when it was slower than plain decoding; beside transfers at usual prices, see
`StepPrices.cost`. What a first drafting takes longer, since
the drafter is told prompts, is paid in instalments while drafting lasts, and the rest at once when
it stops. Whatever estimates say, drafting needs a positive balance, and a probe one that covers its
price, prompts included. The balance starts at INITIAL_CREDIT, or TRUSTED_CREDIT, and grows by
ALLOWANCE a plain step's worth of tokens, so after T of those all that was ever lost, learning and
probing included, is at most that start + ALLOWANCE * T, one step's overshoot and the rest of the
instalments: where those two are four plain steps, below 2% from some 500 steps on, or 900 for a
trusted drafter, whatever it does. What was
earned is kept up to a limit only, so that old gains do not pay for long for a drafter that has
turned bad.

Deterministic: no clock and no random number is read here.
"""

from __future__ import annotations

import math
from enum import Enum, StrEnum

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

INITIAL_CREDIT = 3.0
# Of a drafter that was found good before anybody was served: one text that it drafts badly must not
# silence it for the hundreds of steps that earn a probe.
TRUSTED_CREDIT = 8.0
ALLOWANCE = 0.006
_MAX_CREDIT = 16.0
# No single step is charged more than this, and for prompts.
_MAX_CHARGE = 4.0
_MAX_ENTRY = 16.0
# Drafted steps in which prompts are paid for.
_NUM_INSTALMENTS = 24
_FIRST_INTERVAL = 32
_LONGEST_INTERVAL = 512
# Speculation that lasted so many steps has earned frequent probes again.
_LASTING_STEPS = 64
# Resuming on a changed estimate alone (another batch size, other requests) needs a margin.
_RESUME_GAIN = 1.05
_PROBE_WINDOWS = 8
_MIN_PROBE_STEPS = 2

_FIRST_REQUEST_INTERVAL = 16
_LONGEST_REQUEST_INTERVAL = 256
_REQUEST_PROBE_WINDOWS = 4


class PlainReason(StrEnum):
    """Why a step decodes without drafts."""

    NOT_ALLOWED = "not_allowed"  # no request wants drafts or has room for one
    MEASURING = "measuring"  # the price of a plain step is unknown or old
    BELOW_BREAK_EVEN = "below_break_even"  # fewer tokens a second are expected with drafts
    OVERSPENT = "overspent"  # drafts are expected to pay, but lately they did not


class Verdict(Enum):
    """What the next step does."""

    DRAFT = "draft"
    PROBE = "probe"
    PLAIN = "plain"


class BreakEven:
    """The switch of a worker's speculation as a whole.

    reason: why it is off, None while it is on.
    """

    def __init__(self) -> None:
        self.credit = INITIAL_CREDIT
        self.reason: PlainReason | None = None
        self.num_stops = 0
        self.num_probes = 0
        self.is_probing = False
        self._probe_left = 0
        self._probe_floor = 0.0
        self._unpaid = self._instalment = 0.0
        self._interval = _FIRST_INTERVAL // 2
        self._steps = 0  # since the last stop or resumption

    def trust(self, gain: float) -> None:
        """Nothing has been drafted for anybody yet; gain: as of `decide`, expected from a trial
        with one sequence. Larger batches, where it may not pay, have the same credit to lose."""
        if gain > _RESUME_GAIN:
            self.credit = TRUSTED_CREDIT

    def would_draft(self, gain: float) -> bool:
        """Whether sequences of which this gain is expected (see `decide`) would be drafted for
        without a probe."""
        if self.credit <= 0 or self.reason is PlainReason.OVERSPENT:
            return False
        return gain > (1.0 if self.reason is None else _RESUME_GAIN)

    def steps_to_probe(self, price: float, entry_price: float = 0.0) -> int:
        """Plain steps until a probe of these prices (see `decide`) is due; 0 while probing, and
        while on what they would be at least, were it turned off now."""
        if self.is_probing:
            return 0
        if self.reason is None:
            return _FIRST_INTERVAL
        unpaid = _cover(price, entry_price) - self.credit
        return max(0, self._interval - self._steps, math.ceil(unpaid / ALLOWANCE))

    def can_afford(self, price: float) -> bool:
        """Whether the balance covers a step that may lose `price` plain steps."""
        return self.reason is not PlainReason.OVERSPENT and self.credit >= price

    def decide(
        self,
        gain: float,
        probe_price: float | None,
        num_sequences: int,
        *,
        entry_price: float = 0.0,
    ) -> Verdict:
        """What the next step does.

        gain: expected rate with drafts over that of plain decoding, 1 when plain is best.
        probe_price: plain steps that a step of a probe may lose; None where no probe could show a
        gain, however good the drafter. num_sequences: of the step; more of them, shorter probes.
        entry_price: plain steps that its first step may lose besides, for prompts that the drafter
        has not been told.
        """
        self._steps += 1
        if self._probe_left > 0:
            self._probe_left -= 1
            return Verdict.PROBE
        self._settle(gain)
        if self.reason is None:
            return Verdict.DRAFT
        if probe_price is not None and self._is_probe_due(probe_price, entry_price):
            self._begin_probe(probe_price, num_sequences)
            return Verdict.PROBE
        return Verdict.PLAIN

    def skip(self, num_steps: int) -> None:
        """So many plain steps were run with nothing decided."""
        self.credit = min(self.credit + ALLOWANCE * num_steps, _MAX_CREDIT)
        if self.reason is not None:
            self._steps += num_steps

    def record(self, num_emitted: int, num_sequences: int, cost: float, entry: float = 0.0) -> None:
        """One executed step that decoded only.

        num_emitted: tokens of all sequences. cost: its seconds, drafting included, over those of
        a plain step of as many sequences; 1 for a plain step. entry: what it took besides to tell
        the drafter prompts, over the same.
        """
        if entry > 0:
            self._unpaid += min(entry, _MAX_ENTRY)
            self._instalment = self._unpaid / _NUM_INSTALMENTS
        paid = min(self._unpaid, self._instalment)
        self._unpaid -= paid
        served = num_emitted / num_sequences
        earned = max(served - cost, -_MAX_CHARGE) - paid
        self.credit = min(self.credit + earned + ALLOWANCE * served, _MAX_CREDIT)
        # Windows are judged, not the prompts that had to be told for them.
        self._probe_floor -= paid
        if self.is_probing and self.credit < self._probe_floor:
            self._probe_left = 0

    def _settle(self, gain: float) -> None:
        """Turns on or off by what is expected and what is left."""
        pays = gain > 1.0 and self.credit > 0
        if self.reason is None:
            if not pays:
                self._stop(gain)
        elif self.is_probing:
            self.is_probing = False
            if pays:
                self._resume()
            else:
                self._stop(gain)
        elif self.would_draft(gain):
            self._resume()

    def _resume(self) -> None:
        self.reason = None
        self._steps = 0

    def _stop(self, gain: float) -> None:
        lasted = self.reason is None and self._steps >= _LASTING_STEPS
        self.reason = PlainReason.OVERSPENT if gain > 1.0 else PlainReason.BELOW_BREAK_EVEN
        self.num_stops += 1
        self.credit -= self._unpaid
        self._unpaid = 0.0
        self._interval = _FIRST_INTERVAL if lasted else min(2 * self._interval, _LONGEST_INTERVAL)
        self._steps = 0

    def _is_probe_due(self, price: float, entry_price: float) -> bool:
        return self._steps >= self._interval and self.credit >= _cover(price, entry_price)

    def _begin_probe(self, price: float, num_sequences: int) -> None:
        """Enough steps for some windows, fewer when the first ones bring next to nothing."""
        self.is_probing = True
        self.num_probes += 1
        steps = max(_MIN_PROBE_STEPS, -(-_PROBE_WINDOWS // num_sequences))
        self._probe_left = steps - 1
        self._probe_floor = self.credit - 1.5 * price


def _cover(price: float, entry_price: float) -> float:
    """The balance that the shortest probe needs."""
    return min(_MIN_PROBE_STEPS * price + entry_price, _MAX_CREDIT)


class RequestGates:
    """Which sequences draft while the whole does, by slots as in `AcceptanceRates`.

    A sequence is out when drafting for it brings less than it costs beside the others. It joins
    again for a few windows at growing distances, where others draft anyway.
    """

    def __init__(self) -> None:
        self.num_stops = 0
        self.num_probes = 0
        self._is_out = np.zeros(0, dtype=np.bool_)
        self._waited = np.zeros(0, dtype=np.int64)
        self._interval = np.zeros(0, dtype=np.int64)
        self._probe_left = np.zeros(0, dtype=np.int64)

    def open(self, slot: int) -> None:
        """A new sequence; it drafts some windows before it is judged."""
        if slot >= len(self._is_out):
            more = max(8, slot + 1 - len(self._is_out), len(self._is_out))
            self._is_out = np.concatenate((self._is_out, np.zeros(more, dtype=np.bool_)))
            self._waited, self._interval, self._probe_left = (
                np.concatenate((column, np.zeros(more, dtype=np.int64)))
                for column in (self._waited, self._interval, self._probe_left)
            )
        self._is_out[slot] = False
        self._waited[slot] = 0
        self._interval[slot] = _FIRST_REQUEST_INTERVAL
        self._probe_left[slot] = _REQUEST_PROBE_WINDOWS

    def judge(self, slots: IntArray, gains: FloatArray) -> BoolArray:
        """Which of these sequences pay for themselves, [B]; gains as of `request_gains`."""
        was_out = self._is_out[slots]
        is_out = np.where(was_out, gains <= _RESUME_GAIN, gains <= 1.0)
        leaving = is_out & ~was_out
        if leaving.any():
            gone = slots[leaving]
            self.num_stops += len(gone)
            self._waited[gone] = 0
        returning = slots[was_out & ~is_out]
        self._interval[returning] = _FIRST_REQUEST_INTERVAL
        self._is_out[slots] = is_out
        return ~is_out

    def join(self, slots: IntArray) -> tuple[BoolArray, BoolArray]:
        """Sequences that are out and still take part in the next window, which others pay for.

        Returns which of the [B] take part as a probe, and which of these begin one.
        """
        is_out = self._is_out[slots]
        self._waited[slots] += is_out
        begins = is_out & (self._waited[slots] >= self._interval[slots])
        beginning = slots[begins]
        self._waited[beginning] = 0
        self._probe_left[beginning] = _REQUEST_PROBE_WINDOWS
        self._interval[beginning] = np.minimum(
            2 * self._interval[beginning], _LONGEST_REQUEST_INTERVAL
        )
        self.num_probes += len(beginning)
        takes_part = is_out & (self._probe_left[slots] > 0)
        self._probe_left[slots] -= self._probe_left[slots] > 0
        return takes_part, begins
