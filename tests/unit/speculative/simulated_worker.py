"""A worker that decodes in simulated time, and the drafters that it may meet."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvbraid.speculative.draft_plan import StepOutcome
from kvbraid.speculative.draft_policy import DraftPolicy
from kvbraid.speculative.verify_budget import WidthRule, best_width

Seconds = Callable[[int, int], float]


@dataclass(frozen=True)
class Machine:
    """step(B, w): seconds of a step of B sequences with w rows each; draft(B, k): of drafting."""

    step: Seconds
    draft: Seconds


MACHINES = {
    # Two cores: rows are nearly free up to four, then they cost; a drafter of a third of a step.
    "cpu": Machine(
        lambda b, w: 0.020 + 0.0016 * (b * w - 1) + 0.004 * max(0, b * w - 16),
        lambda b, k: 0.004 + 0.0012 * k + 0.0008 * b,
    ),
    # Memory bound up to some 200 rows; a launch-bound drafter.
    "gpu": Machine(
        lambda b, w: 0.0040 + 4e-6 * b * w + 2.5e-5 * max(0, b * w - 200),
        lambda b, k: 0.0006 + 0.00008 * k + 2e-6 * b,
    ),
    # Compute bound from the start, as a large batch of a mixture of experts is.
    "saturated": Machine(
        lambda b, w: 0.010 + 0.0035 * (w - 1) + 0.00045 * b * w,
        lambda b, k: 0.0015 + 0.0002 * k,
    ),
}

# Chance that a draft is accepted, by tokens emitted by the sequence so far.
Quality = Callable[[int], float]

MAX_DRAFTS = 7


def always(chance: float) -> Quality:
    return lambda num_emitted: chance


@dataclass
class Run:
    """What a run came to. seconds: with speculation. plain_seconds: the same tokens without."""

    seconds: float = 0.0
    plain_seconds: float = 0.0
    num_steps: int = 0
    num_draft_steps: int = 0
    num_verified_rows: int = 0
    widths: list[int] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Over plain decoding."""
        return self.plain_seconds / self.seconds


class Worker:
    """batch sequences of num_tokens each; when one ends, the next begins.

    Measured times are noisy and now and then an outlier; `Run` adds up what steps cost without
    noise, so that the comparison with plain decoding is exact.
    """

    def __init__(
        self,
        policy: DraftPolicy,
        machine: Machine,
        *,
        batch: int,
        num_tokens: int,
        quality: Sequence[Quality],
        seed: int,
        has_confidences: bool = False,
        shows_outliers: bool = True,
        prompt_seconds: float = 0.0,
    ) -> None:
        """prompt_seconds: what drafting takes longer for each sequence that it has not met."""
        self.policy = policy
        self.machine = machine
        self.random = random.Random(seed)
        self.num_tokens = num_tokens
        self.quality = list(quality)
        self.has_confidences = has_confidences
        self.shows_outliers = shows_outliers
        self.prompt_seconds = prompt_seconds
        self.num_started = 0
        # Of them, those to be drafted for at once, whose prompts' rows are taken.
        self.num_expecting = 0
        self.num_same = self.num_skipped = 0
        self.skipped_seconds: list[float] = []
        self.slots: list[int] = []
        self.done: list[int] = []
        self.met: set[int] = set()
        self.qualities: list[Quality] = []
        self.batch = batch
        for _ in range(batch):
            self._start()
        self.run = Run()

    def _start(self) -> None:
        self.num_expecting += self.policy.steps_to_drafts(self.batch) == 0
        self.slots.append(self.policy.open())
        self.done.append(0)
        self.qualities.append(self.quality[self.num_started % len(self.quality)])
        self.num_started += 1
        self.num_same = 0

    def _measured(self, seconds: float) -> float:
        noise = self.random.lognormvariate(0.0, 0.05)
        is_outlier = self.shows_outliers and self.random.random() < 0.01
        return seconds * noise * (20.0 if is_outlier else 1.0)

    def step(self) -> None:
        if self.num_same == 0:
            if self.num_skipped:
                self.policy.skip(self.num_skipped, {len(self.slots): self.skipped_seconds})
            self.num_skipped, self.skipped_seconds = 0, []
            self._asked_step()
            return
        self.num_same -= 1
        self.num_skipped += 1
        batch = len(self.slots)
        seconds = self.machine.step(batch, 1)
        self.skipped_seconds.append(self._measured(seconds))
        self._account(seconds, batch, batch, 1, 0)
        self._advance([0] * batch)

    def _asked_step(self) -> None:
        batch = len(self.slots)
        limits = [max(0, self.num_tokens - done - 1) for done in self.done]
        plan = self.policy.plan(self.slots, limits)
        self.num_same = plan.num_same
        asked = max(plan.num_wanted)
        drafting = sum(wanted > 0 for wanted in plan.num_wanted)
        met = {slot for slot, wanted in zip(self.slots, plan.num_wanted, strict=True) if wanted}
        num_told = len(met - self.met)
        self.met |= met
        draft = self.machine.draft(drafting, asked) if asked else 0.0
        draft += num_told * self.prompt_seconds
        measured_draft = self._measured(draft) if asked else 0.0
        fates = [
            [self._fate(quality, done) for _ in range(wanted)]
            for quality, done, wanted in zip(
                self.qualities, self.done, plan.num_wanted, strict=True
            )
        ]
        confidences = [
            [chance for chance, _ in fate] if self.has_confidences else [] for fate in fates
        ]
        width = self.policy.width(
            plan,
            self.slots,
            limits=limits,
            num_drafts=plan.num_wanted,
            confidences=confidences,
            draft_seconds=measured_draft,
        )
        verified = [min(len(fate), width - 1) for fate in fates]
        accepted = [
            next((n for n in range(count) if not fate[n][1]), count)
            for fate, count in zip(fates, verified, strict=True)
        ]
        seconds = self.machine.step(batch, width)
        self.policy.record(
            StepOutcome(
                slots=list(self.slots),
                width=width,
                num_verified=verified,
                num_accepted=accepted,
                confidences=confidences,
                num_asked=asked,
                num_drafting=drafting,
                draft_seconds=measured_draft,
                step_seconds=self._measured(seconds),
                has_prompt_rows=False,
                told_prompts=num_told > 0 and self.prompt_seconds > 0,
            )
        )
        self._account(seconds + draft, batch + sum(accepted), batch, width, asked)
        self._advance(accepted)

    def _fate(self, quality: Quality, done: int) -> tuple[float, bool]:
        """The chance of a draft and whether it agrees."""
        mean = quality(done)
        spread = min(mean, 1.0 - mean) if self.has_confidences else 0.0
        chance = mean + self.random.choice((-1, 1)) * 0.6 * spread
        return chance, self.random.random() < chance

    def _account(self, seconds: float, emitted: int, batch: int, width: int, asked: int) -> None:
        self.run.seconds += seconds
        self.run.plain_seconds += emitted / batch * self.machine.step(batch, 1)
        self.run.num_steps += 1
        self.run.num_draft_steps += asked > 0
        self.run.num_verified_rows += batch * width
        self.run.widths.append(width)

    def _advance(self, accepted: Sequence[int]) -> None:
        for index, count in reversed(list(enumerate(accepted))):
            self.done[index] += count + 1
            if self.done[index] >= self.num_tokens:
                self.policy.close(self.slots[index])
                self.met.discard(self.slots[index])
                del self.slots[index], self.done[index], self.qualities[index]
                self._start()


def simulate(
    machine: Machine,
    quality: list[Quality],
    *,
    batch: int,
    plain_steps: int,
    seed: int,
    num_tokens: int = 300,
    has_confidences: bool = False,
    width_rule: WidthRule = best_width,
) -> tuple[Run, DraftPolicy]:
    """Serves as many tokens as `plain_steps` plain steps would."""
    policy = DraftPolicy(MAX_DRAFTS, width_rule=width_rule, drafts_in_blocks=has_confidences)
    worker = Worker(
        policy,
        machine,
        batch=batch,
        num_tokens=num_tokens,
        quality=quality,
        seed=seed,
        has_confidences=has_confidences,
    )
    target = plain_steps * machine.step(batch, 1)
    while worker.run.plain_seconds < target:
        worker.step()
    return worker.run, policy
