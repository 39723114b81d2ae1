"""A first generation with drafts, before anyone is served: does the drafter fit its target?

Wrong tap layers, a shifted slot or a missing tensor change no output, so nothing else would tell:
drafts are hardly ever accepted then.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvbraid.chat_template import ChatTemplate
from kvbraid.engine.drafted_decoding import DraftedDecoding
from kvbraid.engine.events import TokensReady
from kvbraid.engine.sequence import EngineRequest, SequenceKey
from kvbraid.request import ChatMessage, SamplingParams, TokenChunk
from kvbraid.speculative.fixed_policy import FixedPolicy
from kvbraid.tokenizer import Tokenizer
from kvbraid.worker.worker import Worker

logger = logging.getLogger(__name__)

_TEXT = "Tell me a short story about a dog that finds a red ball in the park."
_NUM_TOKENS = 48
# Trained drafters have their first draft accepted in more than half of all windows; with a wrong
# tap layer it is a few in a hundred.
_SUSPICIOUS_RATE = 0.2


@dataclass(slots=True)
class DrafterCheck:
    """What the windows of a generation gave."""

    num_windows: int = 0
    num_accepted: int = 0
    num_first_accepted: int = 0

    def add(self, chunk: TokenChunk) -> None:
        """One step; those without drafts do not count."""
        if chunk.num_drafts:
            self.num_windows += 1
            self.num_accepted += chunk.num_accepted
            self.num_first_accepted += chunk.num_accepted > 0

    @property
    def acceptance_length(self) -> float:
        """Tokens a window, the target's own included."""
        return 1 + self.num_accepted / max(1, self.num_windows)

    @property
    def is_suspicious(self) -> bool:
        """Whether the drafter seems to be another target's."""
        return self.num_first_accepted < _SUSPICIOUS_RATE * self.num_windows

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


async def check_drafter(
    worker: Worker, speculation: DraftedDecoding, tokenizer: Tokenizer
) -> DrafterCheck:
    """Generate a built-in text greedily with all the drafts that come. Nothing else may run."""
    prompt = _prompt_ids(tokenizer)[: max(1, worker.identity.max_model_len - _NUM_TOKENS - 1)]
    sampling = SamplingParams(temperature=0.0, seed=0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    request = EngineRequest(
        key=SequenceKey("drafter-check", 0, 0),
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        sampling=worker.sampling_for(sampling, prompt, len(prompt)),
        cache_salt="drafter-check",
    )
    check, policy = DrafterCheck(), speculation.policy
    speculation.policy = FixedPolicy(speculation.max_draft_tokens)
    async with worker.streams.open(request) as events:
        async for event in events:
            if isinstance(event, TokensReady):
                check.add(event.chunk)
    speculation.policy = policy
    check.log()
    return check


def _prompt_ids(tokenizer: Tokenizer) -> list[int]:
    facts = tokenizer.facts
    if facts.chat_template is None:
        return tokenizer.encode(_TEXT, add_special_tokens=True)
    template = ChatTemplate(facts.chat_template, facts.named_tokens)
    rendered = template.render([ChatMessage("user", _TEXT)])
    return tokenizer.encode(rendered, add_special_tokens=False)
