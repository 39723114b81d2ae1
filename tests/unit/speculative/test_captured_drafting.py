"""Draft steps through static buffers against the same steps run eagerly, on CPU.

A graph is its own launches run again (rerun_graphs), so whatever a step does not write anew shows.
"""

from __future__ import annotations

import pytest
import torch

from kvbraid.speculative import captured_drafting
from kvbraid.speculative.drafter_config import AnyDrafterConfig
from kvbraid.speculative.proposal import DraftSampling, Proposal
from kvbraid.speculative.proposer import Proposer
from tests.unit.engine.rerun_graphs import RerunGraphs
from tests.unit.speculative.drafters.captured_proposers import captured_proposer, poison
from tests.unit.speculative.drafters.draft_script import (
    MAX_LEN,
    MAX_SEQUENCES,
    NUM_KV_TOKENS,
    PAGE_SIZE,
    Script,
    check_same,
    stored_rows,
)
from tests.unit.speculative.drafters.random_drafters import (
    DSPARK_FORMS,
    EAGLE3_FORMS,
    dspark_config,
    eagle3_config,
    random_drafter,
)
from tests.unit.speculative.drafters.streams import check, expected, random_stream

FORMS: dict[str, AnyDrafterConfig] = {
    "eagle3": EAGLE3_FORMS["gqa"],
    "eagle3-mla-3.1": EAGLE3_FORMS["mla_3_1"],
    "eagle3-map": EAGLE3_FORMS["draft_vocabulary"],
    "dspark": DSPARK_FORMS["vanilla"],
    "dspark-gated-mla": DSPARK_FORMS["mla_gated"],
    "dspark-rnn-from-masks": DSPARK_FORMS["rnn_from_mask_slots"],
    "dspark-no-confidence-map": dspark_config(
        draft_vocab_size=37, has_own_head=True, has_confidence_head=False
    ),
}
KINDS = {"eagle3": eagle3_config(), "dspark": dspark_config()}
SIZES = {
    "num_kv_tokens": NUM_KV_TOKENS, "max_sequences": MAX_SEQUENCES, "page_size": PAGE_SIZE
}  # fmt: skip
both_kinds = pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def _single_thread() -> None:
    torch.set_num_threads(1)


def captured(config: AnyDrafterConfig, graphs: RerunGraphs, **changes: int) -> Proposer:
    proposer = captured_proposer(
        random_drafter(config).load(), graphs, max_len=MAX_LEN, **(SIZES | changes)
    )
    proposer.kv.pool.fill_nan()
    return proposer


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("config", FORMS.values(), ids=FORMS)
def test_replayed_steps_equal_eager_ones(config: AnyDrafterConfig, seed: int) -> None:
    eager = Proposer(random_drafter(config).load(), **SIZES)
    eager.kv.pool.fill_nan()
    graphs = RerunGraphs()
    ours = captured(config, graphs)
    answered = Script(ours, seed).play(poison(ours))
    check_same(answered, Script(eager, seed).play(), tolerance=1e-5)
    assert ours.num_evicted == eager.num_evicted > 3
    for a, b in zip(stored_rows(ours), stored_rows(eager), strict=True):
        # Products of other sizes round otherwise; rejected drafts of a tie may differ.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4, equal_nan=True)
    assert len(graphs.replays) > graphs.num_captures > 10


@both_kinds
def test_a_capture_writes_to_the_sink_only(config: AnyDrafterConfig) -> None:
    """Also one that is needed when the buffers of its size hold other sequences' steps."""

    class Watching(RerunGraphs):
        def capture(self, compute):  # type: ignore[no-untyped-def]
            before = [part.clone() for part in stored_rows(proposer)]
            replay = super().capture(compute)
            for a, b in zip(before, stored_rows(proposer), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
            return replay

    graphs = Watching()
    # The reserved buffers are filled before there is a proposer to look at.
    proposer = captured(config, graphs)
    streams = [random_stream(name, 60, config.hidden_size, i) for i, name in enumerate("abc")]
    drafter = random_drafter(config)
    for end, num_drafts in ((20, 2), (23, 4), (24, 3), (30, 1)):
        answers = proposer.step([s.task(end + i, num_drafts) for i, s in enumerate(streams)])
        for stream, answer in zip(streams, answers, strict=True):
            check(answer, expected(drafter, stream, num_drafts))
        # Its pages are another sequence's when the next graph is captured.
        proposer.drop(streams[0].key)
        streams = [*streams[1:], random_stream(f"new{end}", 60, config.hidden_size, end)]
    assert graphs.num_captures > 4


@both_kinds
def test_a_graph_serves_a_padded_size_and_an_exact_number_of_drafts(
    config: AnyDrafterConfig,
) -> None:
    graphs = RerunGraphs()
    proposer = captured(config, graphs)
    assert graphs.num_captures == 0, "nothing is captured before it is needed"
    streams = [random_stream(str(i), 60, config.hidden_size, i) for i in range(9)]

    def step(num_sequences: int, num_drafts: int, **changes: object) -> list[int]:
        """Numbers of the graphs of a step of one row a sequence."""
        before = len(graphs.replays)
        chosen = streams[:num_sequences]
        proposer.step([s.task(s.committed + 1, num_drafts, **changes) for s in chosen])
        return graphs.replays[before:]

    drawn = {"sampling": DraftSampling(0.8, 5)}
    rows_4, drafts_4 = step(4, 3)
    assert step(3, 3) == [rows_4, drafts_4], "padded to 4"
    assert step(3, 2)[0] == rows_4
    assert step(3, 2)[1] not in (drafts_4, rows_4)
    assert step(4, 3, **drawn)[1] != drafts_4
    assert step(3, 3) == [rows_4, drafts_4]
    most = step(9, 3)
    assert step(8, 3) != most, "9 is the most, 8 a power of two"
    assert step(9, 3) == most
    assert step(9, 0) == most[:1], "rows only"
    assert graphs.num_captures == len(set(graphs.replays))


@pytest.mark.parametrize("most", [1, 16, 24, 64])
@both_kinds
def test_long_prompts_come_in_pieces(
    config: AnyDrafterConfig, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a piece begins and ends within sequences."""
    monkeypatch.setattr(captured_drafting, "MOST_CAPTURED_ROWS", most)
    drafter, graphs = random_drafter(config), RerunGraphs()
    proposer = captured(config, graphs)
    poison(proposer)()
    streams = [random_stream(str(i), 90, config.hidden_size, i) for i in range(3)]
    tasks = [s.task(n, 3) for s, n in zip(streams, (50, 3, 29), strict=True)]
    for stream, answer in zip(streams, proposer.step(tasks), strict=True):
        check(answer, expected(drafter, stream, 3))
    assert len(graphs.replays) == -(-82 // most) + 1


@both_kinds
def test_laws_are_not_captured(config: AnyDrafterConfig) -> None:
    graphs = RerunGraphs()
    proposer = captured(config, graphs, max_sequences=2)
    stream = random_stream("a", 90, config.hidden_size, 3)
    proposer.step([stream.task(60, 0)])
    wants = DraftSampling(0.9, 7, wants_law=True)
    (answer,) = proposer.step([stream.task(61, 3, sampling=wants)])
    assert isinstance(answer, Proposal)
    assert answer.laws is not None
    assert answer.laws.shape == (3, config.vocab_size)
    assert graphs.replays == [0, 1], "its rows alone"


def test_a_sequence_above_the_longest_is_refused() -> None:
    config = KINDS["eagle3"]
    proposer = captured_proposer(random_drafter(config).load(), RerunGraphs(), max_len=20, **SIZES)
    stream = random_stream("a", 60, config.hidden_size, 1)
    with pytest.raises(ValueError, match="length 30 is outside"):
        proposer.step([stream.task(30, 3)])
