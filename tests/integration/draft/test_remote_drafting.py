"""The engine's side: what it gets when the service is well, slow, mad, gone and back."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvbraid.speculative.proposal import DraftSampling, Proposal, Resync
from kvbraid.transport.draft_terms import DraftPeer


@pytest.fixture(params=["local_socket", "tcp", "grpc"])
def wire(request: pytest.FixtureRequest) -> Any:
    return request.param


async def test_a_step_carries_rows_ids_and_sampling_and_brings_drafts(
    service: Any, target: Any, draft: Any
) -> None:
    sampling = DraftSampling(0.5, -(2**63) + 3)
    first = draft.task("a", 0, [7, 8, 9], sampling=sampling)
    second = draft.task("b", 0, [1], wanted=0)
    answers = await target.step(first, second)
    assert answers == [Proposal((10, 11, 12), (0.5,) * 3), Proposal()]
    got, other = service.proposer.tasks
    assert got.key.endswith("/a")
    assert (got.first_position, got.next_token_ids, got.anchor_id) == (0, (7, 8, 9), 9)
    assert (got.sampling, got.num_wanted, other.num_wanted) == (sampling, 3, 0)
    torch.testing.assert_close(got.rows, draft.rows(0, 3))
    assert target.drafting.max_draft_tokens == 4
    assert target.drafting.step([]) == []


async def test_rows_of_another_type_are_cast_to_the_services(
    service: Any, target: Any, draft: Any
) -> None:
    rows = torch.full((1, draft.hidden), 1.0 + 2**-20, dtype=torch.float64)
    await target.step(draft.task("a", 0, [3], rows=rows))
    assert service.proposer.rows[service.proposer.tasks[0].key].dtype == torch.float32


async def test_missing_rows_are_asked_for_and_sent_again(
    service: Any, target: Any, draft: Any
) -> None:
    await target.step(draft.task("a", 0, [1, 2]))
    assert await target.step(draft.task("a", 4, [5])) == [Resync(2)]
    assert target.fallbacks("resync") == 1
    assert isinstance((await target.step(draft.task("a", 2, [3, 4, 5])))[0], Proposal)
    key = service.proposer.tasks[0].key
    torch.testing.assert_close(service.proposer.rows[key], draft.rows(0, 5))


async def test_rows_sent_again_replace_what_is_held(service: Any, target: Any, draft: Any) -> None:
    await target.step(draft.task("a", 0, [1, 2, 3]))
    await target.step(draft.task("a", 1, [9], rows=torch.full((1, draft.hidden), -1.0)))
    held = service.proposer.rows[service.proposer.tasks[0].key]
    assert held[:, 0].tolist() == [0.0, -1.0]


async def test_a_late_answer_is_thrown_away_and_the_next_step_is_right(
    service: Any, draft: Any, stack: AsyncExitStack
) -> None:
    target = await stack.enter_async_context(
        draft.target(service.address, draft_timeout_ms=20.0, draft_max_failures=100)
    )
    await target.connected()
    service.proposer.gate.clear()
    assert await target.step(draft.task("a", 0, [1])) == [None]
    assert await target.step(draft.task("a", 0, [1, 2])) == [None], "the first is not answered yet"
    assert target.fallbacks("timeout") == 2
    assert target.num_unacknowledged == 1, "the first's only row"
    assert len(service.proposer.tasks) == 0
    service.proposer.gate.set()
    answers = [None]
    while answers == [None]:
        answers = await target.step(draft.task("a", 0, [1, 2, 20]))
    assert answers == [Proposal((21, 22, 23), (0.5,) * 3)]
    sent = [task.next_token_ids for task in service.proposer.tasks]
    assert sent[0] == (1,)
    assert (1, 2) not in sent, "a service that lags gets no more work"
    assert target.num_unacknowledged == 0


async def test_a_step_waits_no_longer_than_a_fraction_of_the_engines_step(
    service: Any, draft: Any, stack: AsyncExitStack
) -> None:
    now = [0.0]
    target = await stack.enter_async_context(
        draft.target(
            service.address,
            clock=lambda: now[0],
            draft_timeout_ms=60000.0,
            draft_timeout_fraction=0.5,
            draft_max_failures=100,
        )
    )
    await target.connected()
    for number in range(3):
        await target.step(draft.task("a", number, [1]))
        now[0] += 0.01
    service.proposer.gate.clear()
    async with asyncio.timeout(10):
        assert await target.step(draft.task("a", 3, [1])) == [None]


ADVERSARIAL = [
    (Proposal((-1, 2, 3)), Proposal()),
    (Proposal((4, 50, 5)), Proposal((4,))),
    (Proposal((4, 2**31 - 1)), Proposal((4,))),
    (Proposal((1, 2, 3, 4, 5, 6)), Proposal((1, 2, 3))),
    (Proposal((1, 2), (0.5, float("nan"))), Proposal((1, 2))),
    (Proposal((1, 2), (1.5, 0.5)), Proposal((1, 2))),
    (Proposal((1, 2), (0.5,)), Proposal((1, 2))),
    (Proposal((1, 60), (0.5, 0.25)), Proposal((1,), (0.5,))),
    (Proposal((), (0.5, 0.5)), Proposal()),
]


@pytest.mark.parametrize(("given", "expected"), ADVERSARIAL)
async def test_nonsense_of_a_drafter_is_cut_off_and_counted(
    given: Proposal, expected: Proposal, service: Any, target: Any, draft: Any
) -> None:
    service.proposer.answer = lambda task: given
    answers = await target.step(draft.task("a", 0, [1]), draft.task("b", 0, [1]))
    assert answers == [expected, expected]
    assert target.fallbacks("bad_ids") == 2
    assert not target.drafting.is_away


@pytest.mark.parametrize("claimed", [3, 4, 2**32 - 1])
async def test_a_resync_for_rows_that_were_not_missing_is_refused(
    claimed: int, service: Any, target: Any, draft: Any
) -> None:
    await target.step(draft.task("a", 0, [1, 2, 3]))
    service.proposer.answer = lambda task: Resync(claimed)
    assert await target.step(draft.task("a", 3, [4])) == [None]
    assert target.fallbacks("refused") == 1


async def test_rows_that_are_not_finite_cost_only_their_own_sequence(
    service: Any, target: Any, draft: Any
) -> None:
    poisoned = draft.rows(0, 2)
    poisoned[1, 2] = float("nan")
    answers = await target.step(
        draft.task("a", 0, [1]), draft.task("b", 0, [1, 2], rows=poisoned), draft.task("c", 0, [5])
    )
    assert answers == [
        Proposal((2, 3, 4), (0.5,) * 3), None, Proposal((6, 7, 8), (0.5,) * 3)
    ]  # fmt: skip
    assert target.fallbacks("refused") == 1
    assert [key[-1] for key in service.proposer.batches[0]] == ["a", "c"]


async def test_more_rows_than_a_message_takes_go_in_several_steps(
    service: Any, target: Any, draft: Any
) -> None:
    ids = list(range(1, 41))
    first = await target.step(draft.task("a", 0, ids), draft.task("b", 0, [1]))
    assert first == [Resync(16), None]
    answers = first
    while isinstance(answers[0], Resync):
        held = answers[0].num_rows
        answers = await target.step(draft.task("a", held, ids[held:]))
    assert answers == [Proposal((41, 42, 43), (0.5,) * 3)]
    key = service.proposer.tasks[0].key
    torch.testing.assert_close(service.proposer.rows[key], draft.rows(0, 40))
    assert max(len(task.next_token_ids) for task in service.proposer.tasks) == 16


async def test_more_sequences_than_a_step_takes_decode_plainly(target: Any, draft: Any) -> None:
    tasks = [draft.task(f"s{i}", 0, [i]) for i in range(10)]
    answers = await target.step(*tasks)
    assert [answer is None for answer in answers] == [False] * 8 + [True] * 2
    assert target.fallbacks("no_room") == 2


async def test_a_sequence_beyond_the_drafters_context_costs_the_others_nothing(
    target: Any, draft: Any
) -> None:
    most = draft.terms.max_position
    assert target.drafting.open_grant("long", most) is not None
    assert target.drafting.open_grant("longer", most + 1) is None
    for number in range(2):
        near = draft.task("near", number, [1])
        long = draft.task("long", most - 1 + number, [2], starts_cold=True)
        answers = await target.step(near, long)
        assert [answer is None for answer in answers] == [False, number == 1]
    assert target.fallbacks("no_room") == 1


async def test_a_service_that_is_away_is_not_waited_for(draft: Any) -> None:
    async with draft.target("127.0.0.1:1") as target:
        assert await target.step(draft.task("a", 0, [1]), draft.task("b", 0, [1])) == [None, None]
        assert target.fallbacks("unavailable") == 2
        assert target.drafting.open_grant("a", 4) is None
        target.drafting.drop("a")


async def test_a_restarted_service_is_found_again_and_gets_the_rows_again(draft: Any) -> None:
    async with AsyncExitStack() as first:
        service = await first.enter_async_context(draft.service(epoch=1))
        port = service.server.port
        async with draft.target(service.address) as target:
            await target.connected()
            await target.step(draft.task("a", 0, [1, 2]))
            service.proposer.gate.clear()
            waiting = asyncio.create_task(target.step(draft.task("a", 2, [3])))
            await asyncio.to_thread(service.proposer.arrived.wait, 10)
            await service.server.stop()
            assert await waiting == [None], "told at once, not after the timeout"
            service.proposer.gate.set()
            await target.away()
            assert await target.step(draft.task("a", 2, [3])) == [None]
            async with draft.service(epoch=2, port=port) as second:
                await target.connected()
                assert await target.step(draft.task("a", 2, [3])) == [Resync(0)]
                assert isinstance((await target.step(draft.task("a", 0, [1, 2, 3])))[0], Proposal)
                assert len(second.proposer.tasks) == 2
            name = "kvbraid_speculation_resyncs_total"
            assert target.registry.get_sample_value(name, {"reason": "restarted"}) == 1


async def test_a_service_that_keeps_failing_is_left_alone_and_probed(
    service: Any, draft: Any, stack: AsyncExitStack
) -> None:
    target = await stack.enter_async_context(
        draft.target(
            service.address,
            draft_timeout_ms=200.0,
            draft_max_failures=2,
            draft_probe_seconds=0.05,
        )
    )
    await target.connected()
    service.proposer.gate.clear()
    for _ in range(2):
        assert await target.step(draft.task("a", 0, [1])) == [None]
    assert target.drafting.is_away
    await target.step(draft.task("a", 0, [1]))
    assert target.fallbacks("unavailable") == 1
    service.proposer.gate.set()
    await target.connected()
    answers: list[Any] = [None]
    while answers == [None]:
        answers = await target.step(draft.task("a", 0, [1]))
    assert answers == [Proposal((2, 3, 4), (0.5,) * 3)]


async def test_ends_of_sequences_travel_with_the_next_step_or_alone(
    service: Any, target: Any, draft: Any
) -> None:
    await target.step(draft.task("a", 0, [1]), draft.task("b", 0, [1]), draft.task("c", 0, [1]))
    target.drafting.drop("a")
    await target.step(draft.task("b", 1, [2]))
    assert [key[-1] for key in service.proposer.dropped] == ["a"]
    target.drafting.drop("b")
    await draft.eventually(lambda: len(service.proposer.dropped) == 2)
    assert list(service.proposer.rows) == [service.proposer.tasks[2].key]


async def test_ends_that_were_lost_with_a_stream_are_told_on_the_next_one(
    service: Any, target: Any, draft: Any
) -> None:
    await target.step(draft.task("a", 0, [1]), draft.task("b", 0, [1]))
    target.drafting.drop("a")
    await draft.raw(service, incarnation=5).open()
    # Refused, with the end of a: the other stream speaks for this worker.
    assert await target.step(draft.task("b", 1, [2])) == [None]
    await draft.eventually(lambda: [key[-1] for key in service.proposer.dropped] == ["a"])
    target.drafting.drop("b")
    await draft.eventually(lambda: not service.proposer.rows)
    assert [key[-1] for key in service.proposer.dropped] == ["a", "b"], "each is told once"


async def test_a_sequence_that_begins_again_under_its_name_is_dropped_first(
    service: Any, target: Any, draft: Any
) -> None:
    await target.step(draft.task("a", 0, [1, 2, 3]))
    target.drafting.drop("a")
    assert await target.step(draft.task("a", 3, [4])) == [Resync(0)]


async def test_a_draining_service_is_left_in_peace(service: Any, target: Any, draft: Any) -> None:
    await target.step(draft.task("a", 0, [1]))
    async with asyncio.timeout(5):
        assert await service.server.drain(), "the stream ended in time"
    await target.away()
    assert await target.step(draft.task("a", 1, [2])) == [None]
    assert target.fallbacks("unavailable") == 1


@pytest.mark.parametrize(
    "peer",
    [
        DraftPeer(5, "another", "drafter", 50, 4),
        DraftPeer(5, "target", "another", 50, 4),
        DraftPeer(5, "target", "drafter", 49, 4),
    ],
)
async def test_a_service_for_another_model_is_never_asked(
    peer: DraftPeer, service: Any, draft: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with draft.target(service.address, peer=peer) as target:
        await draft.eventually(lambda: "of the worker" in caplog.text)
        assert await target.step(draft.task("a", 0, [1])) == [None]
    assert service.proposer.tasks == []


async def test_two_targets_with_the_same_names_do_not_meet(
    service: Any, target: Any, draft: Any
) -> None:
    async with draft.target(service.address, incarnation=6) as other:
        await other.connected()
        mine, its = await asyncio.gather(
            target.step(draft.task("a", 0, [1, 2])), other.step(draft.task("a", 0, [30]))
        )
        assert (mine[0].token_ids[0], its[0].token_ids[0]) == (3, 31)
        assert await other.step(draft.task("a", 2, [5])) == [Resync(1)]
        other.drafting.drop("a")
        await draft.eventually(lambda: service.proposer.dropped)
        assert isinstance((await target.step(draft.task("a", 2, [5])))[0], Proposal)


async def test_steps_after_the_worker_has_stopped_are_plain(service: Any, draft: Any) -> None:
    async with draft.target(service.address) as target:
        await target.connected()
    assert await target.step(draft.task("a", 0, [1])) == [None]


async def test_drafts_beyond_what_a_worker_wanted_of_a_cut_task_are_not_shown(
    target: Any, service: Any, draft: Any
) -> None:
    service.proposer.answer = lambda task: Proposal((1,) * 9)
    whole = draft.task("a", 0, [1] * 20)
    assert await target.step(whole) == [Resync(16)]
    assert await target.step(replace(whole, first_position=16, rows=whole.rows[16:],
                                     next_token_ids=(1,) * 4)) == [Proposal((1, 1, 1))]  # fmt: skip
