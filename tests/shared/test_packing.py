"""The packed batch: positions, targets, and what breaks the contract."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.model.cpu.cpu_decoder import round_up
from shared.model.packing import PackedBatch, pack
from tests.packed import pack_from


@st.composite
def groups(draw):
    """Sequences that share a few prompts, and masks: turns of an environment lie between targets."""
    sequences, masks = [], []
    for _ in range(draw(st.integers(1, 6))):
        prompt = draw(st.sampled_from([[5, 6], [5, 6, 1], [7]]))
        rest = draw(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=5))
        sequences.append(prompt + [token for token, _ in rest])
        masks.append(bytes(len(prompt)) + bytes(trained for _, trained in rest))
    return sequences, masks


def whole_sequences(batch):
    """[segments] the places in the stream of each sequence, its prefix included."""
    ends = torch.tensor(batch.lengths).cumsum(0).tolist()
    segments = [list(range(end - length, end)) for end, length in zip(ends, batch.lengths, strict=True)]
    return [
        (segments[prefix] if prefix >= 0 else []) + own for prefix, own in zip(batch.prefixes, segments, strict=True)
    ]


@settings(max_examples=50)
@given(groups(), st.booleans())
def test_every_target_is_predicted_behind_the_tokens_that_came_before_it(group, share):
    sequences, masks = group
    batch = pack(sequences, masks, share_prefixes=share)
    ids, expected, before = batch.token_ids.tolist(), [], {}
    for sequence, mask in zip(sequences, masks, strict=True):
        expected += [sequence[: place + 1] for place in range(len(sequence)) if mask[place]]
    for places in whole_sequences(batch):
        assert batch.positions[places].tolist() == list(range(len(places)))
        before |= {place: [ids[other] for other in places[: number + 1]] for number, place in enumerate(places)}
    pairs = zip(batch.loss_positions.tolist(), batch.targets.tolist(), strict=True)
    assert [[*before[place], target] for place, target in pairs] == expected
    assert batch.longest == max(map(len, whole_sequences(batch)))
    if not share:
        assert ids == sum(sequences, []) and set(batch.prefixes) == {-1}


def test_a_prompt_of_several_sequences_is_stored_once_with_what_stands_before_a_target():
    batch = pack_from([[5, 6, 7, 8], [1, 2], [5, 6, 9], [5, 6], [5, 6, 7, 7]], [2, 1, 2, 2, 2])
    assert batch.token_ids.tolist() == [5, 6, 7, 1, 2, 7] and batch.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.lengths == (2, 1, 2, 1) and batch.prefixes == (-1, 0, -1, 0) and batch.longest == 3
    assert batch.loss_positions.tolist() == [1, 2, 3, 1, 1, 5] and batch.targets.tolist() == [7, 8, 2, 9, 7, 7]
    # 7 and 8 answer a turn of the first
    batch = pack([[5, 6, 1, 7, 8, 2], [5, 6, 3]], [b"\0\0\1\0\0\1", b"\0\0\1"])
    assert batch.token_ids.tolist() == [5, 6, 1, 7, 8] and batch.prefixes == (-1, 0)
    assert batch.targets.tolist() == [1, 2, 3] and batch.loss_positions.tolist() == [1, 4, 1]


def test_routes_lie_beside_their_tokens():
    """Of a shared prompt the first sequence's; tokens that have none, and those that pad the batch, are marked."""
    sequences, firsts = [[5, 6, 7, 8, 4], [1, 2, 3], [5, 6, 9, 3]], [2, 1, 2]
    batch = pack_from(sequences, firsts, routes=[[b"aa", b"bb", b"cc", b"dd"], [], [b"ee", b"ff", b"gg"]])
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 1, 2, 3, 9]
    expected = [*b"aabbccdd", *b"\xff" * 6, *b"gg"]
    assert batch.routes.flatten().tolist() == expected
    assert round_up(batch, 3).routes.flatten().tolist() == expected + [255] * 2
    assert pack_from(sequences, firsts).routes is None and pack([], []).routes is None
    with pytest.raises(ValueError, match="several lengths"):
        pack_from(sequences, firsts, routes=[[b"aa", b"b"], [], []])


@pytest.mark.parametrize(("masks", "message"), [
    ([b"\0\1", b""], "sequence 1: a mask of 0 for 3"), ([b"\0\1", b"\0\1"], "sequence 1: a mask of 2 for 3"),
    ([b"\0\1", b"\1\1\1"], "sequence 1: .*first token cannot be a target"), ([b"\0\1"], "2 sequences but 1"),
])  # fmt: skip
def test_a_mask_that_does_not_fit_is_refused(masks, message):
    with pytest.raises(ValueError, match=message):
        pack([[1, 2], [1, 2, 3]], masks)


IDS = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(("lengths", "prefixes", "loss_positions", "message"), [
    ((2,), (-1,), IDS[:0], "token_ids"), ((3, 0), (-1, -1), IDS[:0], "at least one token"),
    ((3,), (-1,), IDS, "loss_positions"), ((2, 1), (-1, 1), IDS[:0], "segment 1 continues 1"),
    ((2, 1), (-1,), IDS[:0], "1 prefixes for 2 segments"),
])  # fmt: skip
def test_shapes_that_contradict_each_other_are_refused(lengths, prefixes, loss_positions, message):
    with pytest.raises(ValueError, match=message):
        PackedBatch(IDS, IDS, lengths, prefixes, loss_positions, IDS[:0])


def test_rounding_up_adds_a_segment_of_stand_ins_and_no_sequences_give_one_token():
    rounded = round_up(pack([[5, 6, 7], [8, 9]], [b"\0\1\1", b"\0\1"]), 4)
    assert rounded.token_ids.tolist() == [5, 6, 7, 8, 9, 0, 0, 0] and rounded.positions.tolist()[5:] == [0, 1, 2]
    assert rounded.lengths == (3, 2, 3) and rounded.prefixes == (-1, -1, -1)
    assert rounded.loss_positions.tolist() == [0, 1, 3, 0] and rounded.targets.tolist() == [6, 7, 9, 0]
    assert round_up(rounded, 4) is rounded
    empty = pack([], [])
    assert empty.tokens == 1 and empty.lengths == (1,) and empty.targets.shape == (0,)
    assert round_up(empty, 2).tokens == 2 and len(round_up(empty, 2).targets) == 0
