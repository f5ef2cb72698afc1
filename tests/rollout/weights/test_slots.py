"""The two slots through which a model streams into an engine: nothing is read too early or written over too early."""

from __future__ import annotations

import pytest
import torch

from rollout.weights import slots
from rollout.weights.layout import plan_layout
from rollout.weights.slots import WeightSlots
from shared.errors import DeadlineExceeded

LAYOUT = plan_layout([("a", (4, 16)), ("b", (2, 16)), ("c", (2, 16)), ("d", (4, 16))], torch.float32, world=1)
"""three buckets: a; b and c; d"""


def test_each_bucket_is_read_once_it_is_complete_and_is_free_once_every_worker_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slots, "DELIVERY_DEADLINE_S", 0.0)
    rank = WeightSlots.create(LAYOUT, 2, torch.device("cpu"))
    workers = [WeightSlots.open(LAYOUT, **rank.describe()) for _ in range(2)]
    rank.begin(7)
    values = {
        name: torch.full(place.shape, float(number)) for number, (name, place) in enumerate(LAYOUT.places.items())
    }
    for number in (0, 1):
        names = rank.buckets[number].names
        rank.slot(number).copy_(torch.cat([values[name].flatten() for name in names]).view(torch.uint8))
        rank.fill(number)
    for reader, worker in enumerate(workers):
        assert rank.taken == 0, "the other worker has not read the first bucket"
        stream = worker.tensors(7, engine=3, reader=reader)
        for name in ("a", "b", "c"):
            received, tensor = next(stream)
            assert received == name and torch.equal(tensor, values[name])
        with pytest.raises(DeadlineExceeded, match="engine process 3"):
            next(stream)  # the third bucket is not complete
    assert (rank.filled, rank.taken) == (2, 2)
    with pytest.raises(DeadlineExceeded):
        next(workers[0].tensors(6, engine=3))
    rank.begin(8)
    assert (rank.filled, rank.taken) == (0, 0)
    for side in (rank, *workers):
        side.close()
