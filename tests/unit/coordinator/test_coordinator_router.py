"""Where requests go, given what is known of the workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from coordinator.config import RoutingSettings
from coordinator.messages import WorkerInfo
from coordinator.registry import Pool, Registry, Worker
from coordinator.router import Router
from kvbraid.errors import OverloadedError, UnavailableError
from kvbraid.request import GenerateRequest, SamplingParams
from kvbraid.telemetry.metrics import CoordinatorMetrics


def worker(pool: Pool, address: str, **info: Any) -> Worker:
    """A worker that is up."""
    facts: dict[str, Any] = {
        "role": pool.value, "incarnation": 1, "model": "m", "model_digest": "d",
        "max_model_len": 1000, "num_pool_tokens": 8000, "num_free_tokens": 8000,
        "num_running": 0, "num_waiting": 0, "max_num_seqs": 4, "num_queued_prompt_tokens": 0,
    }  # fmt: skip
    made = Worker(pool, address)
    made.is_serving = True
    made.take(WorkerInfo(**facts | info))
    return made


class KnownWorkers(Registry):
    """A registry that is told its workers."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._known = list(workers)

    def workers(self, pool: Pool) -> list[Worker]:
        return [w for w in self._known if w.pool is pool]

    def is_configured(self, pool: Pool) -> bool:
        return bool(self.workers(pool))


def router(*workers: Worker, **settings: Any) -> Router:
    routing = RoutingSettings(**{"local_prefill_max_tokens": 16, **settings})
    return Router(KnownWorkers(workers), routing, CoordinatorMetrics())


def request(
    length: int = 100, max_tokens: int = 50, first: int = 0, salt: str = ""
) -> GenerateRequest:
    return GenerateRequest(
        "r", tuple(range(first, first + length)), SamplingParams(max_tokens=max_tokens), salt
    )


def decode(address: str, **info: Any) -> Worker:
    return worker(Pool.DECODE, address, **info)


def prefill(address: str, **info: Any) -> Worker:
    return worker(Pool.PREFILL, address, **info)


def test_the_decode_worker_with_the_most_room_is_taken() -> None:
    roomy = decode("b", num_free_tokens=5000)
    assert router(decode("a", num_free_tokens=3000), roomy).place(request(), ()).decode is roomy


def test_room_that_was_promised_counts_before_the_worker_knows_of_it() -> None:
    first, second = decode("a"), decode("b")
    placing = router(first, second)
    taken = [placing.place(request(first=i * 200), ()).decode for i in range(4)]
    assert {taken.count(first), taken.count(second)} == {2}


def test_a_released_placement_gives_everything_back_once() -> None:
    sender, receiver = prefill("p"), decode("d")
    placement = router(sender, receiver).place(request(), ())
    assert (receiver.num_in_flight, receiver.num_reserved_tokens) == (1, 150)
    assert (sender.num_in_flight, sender.num_reserved_tokens) == (1, 100)
    placement.prefill_is_done()
    assert (sender.num_in_flight, sender.num_reserved_tokens) == (0, 0)
    for _ in range(2):
        placement.release()
    assert (receiver.num_in_flight, receiver.num_reserved_tokens) == (0, 0)
    assert (sender.num_in_flight, sender.num_reserved_tokens) == (0, 0)


def test_the_prefill_worker_with_the_shortest_queue_is_taken() -> None:
    idle = prefill("q", num_queued_prompt_tokens=10)
    placing = router(prefill("p", num_queued_prompt_tokens=500), idle, decode("d"))
    assert placing.place(request(), ()).prefill is idle


@pytest.mark.parametrize(("length", "is_local"), [(16, True), (17, False)])
def test_short_prompts_stay_on_the_decode_worker(length: int, is_local: bool) -> None:
    placement = router(prefill("p"), decode("d")).place(request(length), ())
    assert (placement.prefill is None) is is_local


def test_tokens_known_to_the_decode_worker_do_not_count() -> None:
    placing = router(prefill("p"), decode("d"))
    assert placing.place(request(128 + 16), ()).prefill is not None
    assert placing.place(request(128 + 16), ()).prefill is None
    assert placing.place(request(128 + 17), ()).prefill is not None
    assert placing.place(request(128 + 16, salt="other"), ()).prefill is not None


def test_emitted_tokens_are_part_of_the_prompt_of_a_retry() -> None:
    placing = router(prefill("p"), decode("d"))
    assert placing.place(request(10), ()).prefill is None
    assert placing.place(request(10), range(7)).prefill is not None


def test_a_prefix_draws_its_continuations_to_the_same_workers() -> None:
    placing = router(prefill("p"), prefill("q"), decode("a"), decode("b"))
    first = placing.place(request(200), ())
    first.release()
    other = placing.place(request(200, first=500), ())
    other.release()
    again = placing.place(request(300), ())
    assert (again.decode, again.prefill) == (first.decode, first.prefill)


def test_a_busy_worker_does_not_get_more_than_its_share_for_its_prefix() -> None:
    first, second = decode("a"), decode("b")
    placing = router(first, second)
    taken = [placing.place(request(200), ()).decode for _ in range(8)]
    assert abs(taken.count(first) - taken.count(second)) <= 2


def test_a_replaced_worker_has_lost_its_prefixes() -> None:
    receiver = decode("d")
    placing = router(prefill("p"), receiver)
    placing.place(request(144), ()).release()
    assert receiver.info is not None
    receiver.take(worker(Pool.DECODE, "d", incarnation=2).info or receiver.info)
    assert placing.place(request(144), ()).prefill is not None


def test_workers_that_failed_the_request_are_avoided_while_there_are_others() -> None:
    first, second = decode("a", num_free_tokens=8000), decode("b", num_free_tokens=100)
    sender = prefill("p")
    placing = router(sender, first, second)
    placement = placing.place(request(), (), avoid=[first, sender])
    assert (placement.decode, placement.prefill) == (second, sender)


def test_workers_that_are_not_up_get_nothing() -> None:
    draining, other = decode("a"), decode("b", num_free_tokens=10)
    draining.is_serving = False
    suspect = decode("c")
    suspect.suspect()
    assert router(draining, suspect, other).place(request(), ()).decode is other


def test_without_a_decode_worker_the_states_are_told() -> None:
    gone = decode("a")
    gone.suspect()
    with pytest.raises(UnavailableError, match="no decode worker is up: a is down"):
        router(gone).place(request(), ())
    with pytest.raises(UnavailableError, match="none is configured"):
        router().place(request(), ())


def test_a_worker_that_can_never_hold_the_request_is_not_taken() -> None:
    small, large = decode("a", num_pool_tokens=120), decode("b", num_free_tokens=1)
    assert router(small, large).place(request(), ()).decode is large
    with pytest.raises(UnavailableError, match="can hold 150 tokens"):
        router(small).place(request(), ())


def test_full_queues_are_an_overload_with_a_time_to_come_back() -> None:
    placing = router(decode("a", max_num_seqs=2), max_queued_requests=1)
    placements = [placing.place(request(), ()) for _ in range(3)]
    with pytest.raises(OverloadedError) as refusal:
        placing.place(request(), ())
    assert refusal.value.retry_after_s > 0
    placements[0].release()
    placing.place(request(), ())


def test_a_missing_prefill_worker_is_replaced_or_reported() -> None:
    gone = prefill("p")
    gone.suspect()
    assert router(gone, decode("d")).place(request(), ()).prefill is None
    with pytest.raises(UnavailableError, match="no prefill worker is up"):
        router(gone, decode("d"), prefill_fallback=False).place(request(), ())


def test_a_prompt_too_long_for_prefill_workers_is_computed_where_it_fits() -> None:
    short = prefill("p", max_model_len=64)
    assert router(short, decode("d")).place(request(), ()).prefill is None


def test_broken_handoffs_are_not_tried_again() -> None:
    one, other = prefill("p"), prefill("q")
    only = decode("a")
    place = router(one, other, only).place
    assert place(request(), (), (only,), [(one, only)]).prefill is other
    assert place(request(), (), (only,), [(other, only)]).prefill is one
    assert place(request(), (), (only,), [(one, only), (other, only)]).prefill is None


def test_a_broken_handoff_leaves_the_same_prefill_worker_for_another_decode_worker() -> None:
    sender, first, second = prefill("p"), decode("a"), decode("b")
    placement = router(sender, first, second).place(request(), (), (first,), [(sender, first)])
    assert (placement.prefill, placement.decode) == (sender, second)


def test_without_fallback_a_broken_handoff_is_better_than_none() -> None:
    sender, only = prefill("p"), decode("a")
    placed = router(sender, only, prefill_fallback=False)
    assert placed.place(request(), (), (only,), [(sender, only)] * 3).prefill is sender
