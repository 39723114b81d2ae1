"""A first generation with drafts, before anyone is served: does the drafter fit its target?

Wrong tap layers, a shifted slot or a missing tensor change no output, so nothing else would tell:
drafts are hardly ever accepted then. The adaptive policy begins with what is accepted here: a
drafter that does not fit is left alone until a probe, and costs the first clients nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from kvbraid.chat_template import ChatTemplate
from kvbraid.engine.drafted_decoding import DraftedDecoding
from kvbraid.engine.sequence import SequenceKey
from kvbraid.request import ChatMessage, TokenChunk
from kvbraid.speculative.draft_policy import DraftPolicy
from kvbraid.speculative.fixed_policy import FixedPolicy, ignore
from kvbraid.tokenizer import Tokenizer
from kvbraid.worker.start_up_generation import generate_to_the_end
from kvbraid.worker.worker import Worker

logger = logging.getLogger(__name__)

_TEXT = "Tell me a short story about a dog that finds a red ball in the park."
_NUM_TOKENS = 48
# Share of windows whose first draft is accepted. Trained drafters have 0.65 and more on such text.
# Another model's weights, drafts one slot late or a missing tensor leave next to nothing. Wrong tap
# layers may leave more, for neighbouring layers resemble each other: tiny-mla's drafters still had
# 0.1 to 0.7 with taps one layer off. What a dialect means by its numbers is the loader's to know.
_SUSPICIOUS_RATE = 0.2
_LOW_RATE = 0.45


@dataclass(slots=True)
class DrafterCheck:
    """What the windows of a generation gave."""

    num_windows: int = 0
    num_accepted: int = 0
    num_first_accepted: int = 0

    def add(self, chunk: TokenChunk) -> None:
        """Steps of the generation; those without drafts do not count."""
        for window in chunk.windows:
            if window.num_drafts:
                self.num_windows += 1
                self.num_accepted += window.num_accepted
                self.num_first_accepted += window.num_accepted > 0

    @property
    def acceptance_length(self) -> float:
        """Tokens a window, the target's own included."""
        return 1 + self.num_accepted / max(1, self.num_windows)

    @property
    def is_suspicious(self) -> bool:
        """Whether the drafter seems to be another target's."""
        return self.num_first_accepted < _SUSPICIOUS_RATE * self.num_windows

    @property
    def is_low(self) -> bool:
        """Whether fewer drafts are accepted than a trained drafter may expect."""
        return self.num_first_accepted < _LOW_RATE * self.num_windows

    def log(self) -> None:
        """Say what was measured."""
        if not self.num_windows:
            logger.warning("drafter not checked: no drafts came")
            return
        figures = (self.acceptance_length, self.num_windows, self.num_first_accepted)
        logger.info(
            "drafter check: %.2f tokens a window, %d windows, first draft %d times", *figures
        )
        if self.is_suspicious:
            logger.error(
                "the drafter hardly ever agrees with this target: another model's, tap layers or "
                "slots that its dialect counts differently, or weights that are missing"
            )
        elif self.is_low:
            logger.warning(
                "the drafter agrees with this target less than trained ones do: weakly trained, or "
                "its tap layers are not those that it was trained with"
            )


async def check_drafter(
    worker: Worker, speculation: DraftedDecoding, prompt: Sequence[int]
) -> DrafterCheck:
    """Generate a text greedily with all the drafts that come. Nothing else may run."""
    prompt = prompt[: max(1, worker.identity.max_model_len - _NUM_TOKENS - 1)]
    check, policy = DrafterCheck(), speculation.policy
    learn = policy.observe_acceptance if isinstance(policy, DraftPolicy) else ignore
    speculation.policy = FixedPolicy(speculation.max_draft_tokens, learn)
    key = SequenceKey("drafter-check", 0, 0)
    for chunk in await generate_to_the_end(worker, key, prompt, _NUM_TOKENS):
        check.add(chunk)
    speculation.policy = policy
    check.log()
    return check


def check_prompt(tokenizer: Tokenizer) -> list[int]:
    """Token ids of a built-in text, as a chat where there is a template."""
    facts = tokenizer.facts
    if facts.chat_template is None:
        return tokenizer.encode(_TEXT, add_special_tokens=True)
    template = ChatTemplate(facts.chat_template, facts.named_tokens)
    rendered = template.render([ChatMessage("user", _TEXT)])
    return tokenizer.encode(rendered, add_special_tokens=False)
