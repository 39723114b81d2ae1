"""Several draft services behind one name, as a Kubernetes Service puts them."""

from __future__ import annotations

from typing import Any

import torch

from kvbraid.speculative.proposal import Proposal
from kvbraid.testing import LossyProxy


async def test_rows_go_to_the_very_service_that_drafts(draft: Any) -> None:
    async with (
        draft.service(epoch=1) as first,
        draft.service(epoch=2) as second,
        LossyProxy(first.address, second.address) as name,
        draft.target(name.address) as target,
        draft.pusher() as pusher,
    ):
        await target.connected()
        for key in ("a", "b"):
            grant = target.drafting.open_grant(key, 4)
            assert (grant.address, grant.incarnation) == (first.address, 1)
            pusher.rows.begin(grant)
            pusher.rows.push(grant.transfer_id, 0, draft.rows(0, 4), [1, 2, 3, 4])
            pusher.rows.finish(grant.transfer_id)
        await draft.eventually(lambda: pusher.num_sent == 8)
        answers = await target.step(
            draft.task("a", 4, [], anchor_id=6), draft.task("b", 4, [], anchor_id=6)
        )
        assert [type(answer) for answer in answers] == [Proposal, Proposal]
        for rows in first.proposer.rows.values():
            torch.testing.assert_close(rows, draft.rows(0, 4))
        assert second.proposer.tasks == []


async def test_a_service_that_names_no_address_is_reached_as_the_worker_reached_it(
    draft: Any, monkeypatch: Any
) -> None:
    async with draft.service() as service, LossyProxy(service.address) as name:
        monkeypatch.setattr(type(service.server), "address", "")
        async with draft.target(name.address) as target:
            await target.connected()
            assert target.drafting.open_grant("a", 4).address == name.address
