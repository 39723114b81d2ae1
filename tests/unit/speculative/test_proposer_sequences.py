"""Which rows a proposer holds: gaps, cold starts, eviction, a full pool, malformed tasks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvbraid.errors import ConfigError
from kvbraid.kv.slots import LogicalSlots
from kvbraid.speculative.drafter_config import AnyDrafterConfig, DSparkConfig
from kvbraid.speculative.proposal import DraftTask, Proposal, Resync
from kvbraid.speculative.proposer import Proposer
from tests.unit.speculative.drafters.random_drafters import (
    VOCAB,
    dspark_config,
    eagle3_config,
    random_drafter,
)
from tests.unit.speculative.drafters.streams import (
    Stream,
    check,
    expected,
    poisoned,
    random_stream,
)

KINDS = {"eagle3": eagle3_config(), "dspark": dspark_config()}
PAGE = 4


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def config(request: pytest.FixtureRequest) -> AnyDrafterConfig:
    torch.set_num_threads(1)
    return request.param  # type: ignore[no-any-return]


def stream(name: str, config: AnyDrafterConfig) -> Stream:
    return random_stream(name, 80, config.hidden_size, sum(map(ord, name)))


def test_a_gap_is_answered_with_what_is_held(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter)
    a = stream("a", config)
    assert proposer.step([a.task(12, 4, first=5)]) == [Resync(0)]
    proposer.step([a.task(9, 4, first=0)])
    assert proposer.step([a.task(12, 4, first=10)]) == [Resync(9)]
    (answer,) = proposer.step([a.task(14, 4, first=9)])
    check(answer, expected(drafter, a, 4))


def test_a_refused_task_does_not_disturb_the_others(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter)
    streams = [stream(name, config) for name in "abc"]
    tasks = [s.task(10, 4, first=first) for s, first in zip(streams, (0, 3, 0), strict=True)]
    answers = proposer.step(tasks)
    assert answers[1] == Resync(0)
    check(answers[0], expected(drafter, streams[0], 4))
    check(answers[2], expected(drafter, streams[2], 4))


def test_a_cold_start_forgets_and_earlier_rows_warm_it_again(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter)
    a = stream("a", config)
    proposer.step([a.task(30, 4)])
    (answer,) = proposer.step([a.task(34, 4, starts_cold=True)])
    assert a.base == 30
    check(answer, expected(drafter, a, 4))
    a.base = 0
    (answer,) = proposer.step([a.task(36, 4, first=0)])
    check(answer, expected(drafter, a, 4))


def test_without_any_rows_only_dspark_proposes(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter)
    a, b = stream("a", config), stream("b", config)
    tasks = [a.task(20, 4, first=20, starts_cold=True), b.task(6, 4)]
    cold, warm = proposer.step(tasks)
    check(cold, expected(drafter, a, 4))
    check(warm, expected(drafter, b, 4))
    assert isinstance(cold, Proposal)
    assert bool(cold.token_ids) == (config is KINDS["dspark"])
    (answer,) = proposer.step([a.task(23, 4)])
    check(answer, expected(drafter, a, 4))


def test_eagle3_asks_for_the_row_that_a_truncation_took_from_it() -> None:
    drafter = random_drafter(KINDS["eagle3"])
    proposer = poisoned(drafter)
    a = stream("a", drafter.config)
    proposer.step([a.task(20, 4)])
    assert proposer.step([a.task(15, 4, first=15)]) == [Resync(14)]
    (answer,) = proposer.step([a.task(15, 4, first=14)])
    check(answer, expected(drafter, a, 4))


def test_dspark_proposes_from_the_rows_that_a_truncation_left() -> None:
    drafter = random_drafter(KINDS["dspark"])
    proposer = poisoned(drafter)
    a = stream("a", drafter.config)
    proposer.step([a.task(20, 4)])
    (answer,) = proposer.step([a.task(15, 4, first=15)])
    check(answer, expected(drafter, a, 4))


def test_drop_frees_everything_and_unknown_keys_are_ignored(config: AnyDrafterConfig) -> None:
    proposer = poisoned(random_drafter(config), page_size=PAGE)
    free = proposer.kv.num_free_pages
    a = stream("a", config)
    proposer.step([a.task(30, 4)])
    assert proposer.num_sequences == 1
    assert proposer.kv.num_free_pages < free
    proposer.drop("a")
    proposer.drop("a")
    assert proposer.num_sequences == 0
    assert proposer.kv.num_free_pages == free
    assert proposer.step([a.task(33, 4)]) == [Resync(0)]


def test_a_full_pool_evicts_the_least_recently_used(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter, num_kv_tokens=96, page_size=PAGE)
    a, b, c = (stream(name, config) for name in "abc")
    proposer.step([a.task(32, 4)])
    proposer.step([b.task(32, 4)])
    proposer.step([a.task(34, 4)])
    assert (proposer.num_evicted, proposer.num_sequences) == (0, 2)
    (answer,) = proposer.step([c.task(32, 4)])
    check(answer, expected(drafter, c, 4))
    assert (proposer.num_evicted, proposer.num_sequences) == (1, 2)
    answers = proposer.step([a.task(36, 4), b.task(34, 4)])
    check(answers[0], expected(drafter, a, 4))
    assert answers[1] == Resync(0), "b was the oldest"


def test_slots_run_out_like_pages(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter, max_sequences=2)
    a, b, c = (stream(name, config) for name in "abc")
    proposer.step([a.task(5, 4), b.task(6, 4)])
    (answer,) = proposer.step([c.task(7, 4)])
    check(answer, expected(drafter, c, 4))
    assert proposer.num_evicted == 1
    assert proposer.step([a.task(6, 4)]) == [Resync(0)]
    answers = proposer.step([s.task(8, 4, first=0) for s in (a, b, c)])
    assert answers[2] == Proposal() or answers[0] == Proposal()
    assert sum(answer == Proposal() for answer in answers) == 1, "two slots, three sequences"


def test_a_sequence_that_cannot_fit_goes_on_cold(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter, num_kv_tokens=48, page_size=PAGE)
    small, large = stream("small", config), stream("large", config)
    answers = proposer.step([small.task(12, 4), large.task(60, 4)])
    check(answers[0], expected(drafter, small, 4))
    assert answers[1] == Proposal()
    large.base = 60
    answers = proposer.step([small.task(14, 4), large.task(63, 4)])
    check(answers[0], expected(drafter, small, 4))
    check(answers[1], expected(drafter, large, 4))


def test_sequences_of_the_step_are_not_evicted_for_one_another(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter, num_kv_tokens=64, page_size=PAGE)
    a, b = stream("a", config), stream("b", config)
    proposer.step([a.task(20, 4)])
    proposer.step([b.task(20, 4)])
    answers = proposer.step([b.task(50, 4), a.task(22, 4)])
    assert answers[0] == Proposal()
    check(answers[1], expected(drafter, a, 4))


def test_nothing_is_evicted_in_vain(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter, num_kv_tokens=48, page_size=PAGE)
    small, large = stream("small", config), stream("large", config)
    proposer.step([small.task(12, 4)])
    num_free = proposer.num_free_tokens
    assert proposer.step([large.task(70, 4)]) == [Proposal()]
    assert (proposer.num_evicted, proposer.num_free_tokens) == (0, num_free)
    (answer,) = proposer.step([small.task(14, 4)])
    check(answer, expected(drafter, small, 4))


def test_reused_pages_hold_nothing_of_their_last_owner(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter, num_kv_tokens=64, page_size=PAGE)
    for name in "abcdefgh":
        joining = stream(name, config)
        (answer,) = proposer.step([joining.task(25 + ord(name) % 7, 4)])
        check(answer, expected(drafter, joining, 4))
        (answer,) = proposer.step([joining.task(joining.committed + 3, 4)])
        check(answer, expected(drafter, joining, 4))


def test_pages_that_a_truncation_frees_are_the_last_ones(config: AnyDrafterConfig) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter, num_kv_tokens=76, page_size=PAGE)
    a, b = stream("a", config), stream("b", config)
    proposer.step([a.task(60, 4)])
    proposer.step([a.task(22, 4, first=18)])
    (answer,) = proposer.step([b.task(40, 4)])
    check(answer, expected(drafter, b, 4))
    (answer,) = proposer.step([a.task(24, 4)])
    check(answer, expected(drafter, a, 4))
    assert proposer.num_sequences == 2


def test_nothing_is_written_but_rows_and_scratch_behind_them(config: AnyDrafterConfig) -> None:
    proposer = poisoned(random_drafter(config), page_size=PAGE)
    a, b = stream("a", config), stream("b", config)
    num_drafts = config.max_draft_tokens
    proposer.step([a.task(9, num_drafts), b.task(30, num_drafts)])
    scratch = config.block_size if isinstance(config, DSparkConfig) else num_drafts - 1
    pool = proposer.kv.pool
    written = pool.count_finite_rows() / (pool.spec.num_layers * pool.spec.num_heads)
    assert written == 9 + 30 + 2 * scratch
    assert pool.count_finite_rows(LogicalSlots(np.arange(PAGE))) == 0, "page 0 is nobody's"


def test_an_empty_step(config: AnyDrafterConfig) -> None:
    assert poisoned(random_drafter(config)).step([]) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": torch.zeros(3, 7)}, r"rows \(3, 7\) must be \(3, 24\)"),
        ({"rows": torch.zeros(2, 24)}, r"rows \(2, 24\) must be \(3, 24\)"),
        ({"next_token_ids": (1, -1, 2)}, r"-1\.\.2 are outside \[0, 61\)"),
        ({"next_token_ids": (1, VOCAB, 2)}, r"1\.\.61 are outside"),
        ({"anchor_id": 9}, "anchor 9 is not the last token 2"),
        ({"first_position": -1}, "first_position -1"),
        ({"num_wanted": -2}, "num_wanted -2"),
    ],
)
def test_malformed_tasks_are_refused_and_change_nothing(
    config: AnyDrafterConfig, change: dict, message: str
) -> None:
    drafter = random_drafter(config)
    proposer = poisoned(drafter)
    a = stream("a", config)
    proposer.step([a.task(9, 4)])
    good = DraftTask("b", 0, torch.zeros(3, 24), (1, 1, 2), 2, 4)
    with pytest.raises(ValueError, match=message):
        proposer.step([a.task(12, 4), replace(good, **change)])
    assert proposer.num_sequences == 1
    (answer,) = proposer.step([a.task(12, 4, first=9)])
    check(answer, expected(drafter, a, 4))


def test_two_tasks_of_one_sequence_are_refused(config: AnyDrafterConfig) -> None:
    a = stream("a", config)
    with pytest.raises(ValueError, match="one task a sequence"):
        poisoned(random_drafter(config)).step([a.task(3, 1), a.task(5, 1)])


@pytest.mark.parametrize("sizes", [{"num_kv_tokens": 0}, {"max_sequences": 0}, {"page_size": 0}])
def test_impossible_sizes_are_refused(config: AnyDrafterConfig, sizes: dict) -> None:
    loaded = random_drafter(config).load()
    with pytest.raises(ConfigError, match="must be >= 1"):
        Proposer(loaded, **({"num_kv_tokens": 64, "max_sequences": 2} | sizes))
