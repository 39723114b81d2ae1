"""What is refused before it costs anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.intake import Intake, RequestDraft
from kvbraid.errors import InvalidRequestError
from kvbraid.request import SamplingParams
from kvbraid.tokenizer import load_tokenizer
from kvbraid.validation import Limits

TOKENIZER = load_tokenizer(Path(__file__).parents[2] / "assets" / "tiny-mla")


class Known:
    """A registry with workers for 200,000 tokens."""

    async def wait_limits(self) -> Limits:
        return Limits(max_model_len=200_000, vocab_size=TOKENIZER.vocab_size)


class Counted(Sequence[int]):
    """Ids as a message holds them: each is made when it is asked for."""

    def __init__(self, length: int) -> None:
        self._places = range(length)
        self.num_made = 0

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[each] for each in self._places[place]]
        self.num_made += 1
        return self._places[place] % 1000


async def admitted(prompt: Sequence[int]) -> tuple[int, ...]:
    intake = Intake(
        tokenizer=TOKENIZER,
        template=None,
        registry=Known(),  # type: ignore[arg-type]
        served_model_name="m",
    )
    return (await intake.admit(RequestDraft(prompt, SamplingParams(seed=1)))).prompt_ids


async def test_ids_that_cannot_fit_are_refused_before_they_are_looked_at() -> None:
    prompt = Counted(10**6)
    with pytest.raises(InvalidRequestError, match="has 1000000 tokens; accepted: 1 to 199999"):
        await admitted(prompt)
    assert prompt.num_made <= 1


@pytest.mark.parametrize("length", [1, 65_535, 65_536, 65_537, 131_072, 199_999])
async def test_ids_that_fit_are_all_taken(length: int) -> None:
    assert await admitted(Counted(length)) == tuple(place % 1000 for place in range(length))
