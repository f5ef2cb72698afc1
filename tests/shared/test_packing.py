"""The packed batch: positions, targets, and what breaks the contract."""

import pytest
import torch

from shared.model.cpu.cpu_decoder import round_up
from shared.model.packing import PackedBatch, pack
from tests.packed import pack_from


def test_targets_are_predicted_from_the_position_before_them():
    batch = pack([[5, 6, 7], [8, 9]], [b"\0\1\1", b"\0\1"])
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.lengths == (3, 2)
    assert batch.loss_positions.tolist() == [0, 1, 3]
    assert batch.targets.tolist() == [6, 7, 9]


def test_prompt_tokens_carry_no_target():
    batch = pack([[1, 2, 3, 4], [5, 6]], [b"\0\0\0\1", b"\0\0"])
    assert batch.loss_positions.tolist() == [2] and batch.targets.tolist() == [4]


def test_routes_lie_beside_their_tokens():
    """Of a shared prompt the first sequence's; tokens that have none, and those that pad the batch, are marked."""
    sequences, firsts = [[5, 6, 7, 8, 4], [1, 2, 3], [5, 6, 9, 3]], [2, 1, 2]
    routes = [[b"aa", b"bb", b"cc", b"dd"], [], [b"ee", b"ff", b"gg"]]
    batch = pack_from(sequences, firsts, routes=routes)
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 1, 2, 3, 9]
    expected = [*b"aabbccdd", *b"\xff" * 6, *b"gg"]
    assert batch.routes is not None and batch.routes.flatten().tolist() == expected
    padded = round_up(batch, 3).routes
    assert padded is not None and padded.flatten().tolist() == expected + [255] * 2
    assert pack_from(sequences, firsts).routes is None and pack([], []).routes is None
    with pytest.raises(ValueError, match="several lengths"):
        pack_from(sequences, firsts, routes=[[b"aa", b"b"], [], []])


def test_a_prompt_of_several_sequences_is_stored_once():
    batch = pack_from([[5, 6, 7, 8], [1, 2], [5, 6, 9], [5, 6], [5, 6, 7, 7]], [2, 1, 2, 2, 2])
    assert batch.token_ids.tolist() == [5, 6, 7, 1, 2, 7]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.lengths == (2, 1, 2, 1) and batch.prefixes == (-1, 0, -1, 0)
    assert batch.loss_positions.tolist() == [1, 2, 3, 1, 1, 5]
    assert batch.targets.tolist() == [7, 8, 2, 9, 7, 7]
    assert batch.longest == 3


def test_sharing_can_be_left_out():
    batch = pack_from([[5, 6, 7], [5, 6, 8]], [2, 2], share_prefixes=False)
    assert batch.token_ids.tolist() == [5, 6, 7, 5, 6, 8] and batch.prefixes == (-1, -1)


def test_no_sequences_give_one_token_without_target():
    batch = pack([], [])
    assert batch.tokens == 1 and batch.lengths == (1,) and batch.targets.shape == (0,)


def test_what_an_environment_says_between_two_turns_is_read_and_not_a_target():
    """Both sequences share what stands before their first target; 7 and 8 answer a turn of the first."""
    batch = pack([[5, 6, 1, 7, 8, 2], [5, 6, 3]], [b"\0\0\1\0\0\1", b"\0\0\1"])
    assert batch.token_ids.tolist() == [5, 6, 1, 7, 8] and batch.prefixes == (-1, 0)
    assert batch.targets.tolist() == [1, 2, 3] and batch.loss_positions.tolist() == [1, 4, 1]


@pytest.mark.parametrize(
    ("mask", "message"),
    [(b"", "a mask of 0 for 3"), (b"\0\1", "a mask of 2 for 3"), (b"\1\1\1", "first token cannot be a target")],
)
def test_a_mask_that_does_not_fit_is_refused(mask, message):
    with pytest.raises(ValueError, match=f"sequence 1: .*{message}"):
        pack([[1, 2], [1, 2, 3]], [b"\0\1", mask])


def test_counts_must_agree():
    with pytest.raises(ValueError, match="2 sequences but 1"):
        pack([[1, 2], [3, 4]], [b"\0\1"])


def test_shapes_that_contradict_each_other_are_refused():
    ids = torch.zeros(3, dtype=torch.int64)
    none = ids[:0]
    with pytest.raises(ValueError, match="token_ids"):
        PackedBatch(ids, ids, (2,), (-1,), none, none)
    with pytest.raises(ValueError, match="at least one token"):
        PackedBatch(ids, ids, (3, 0), (-1, -1), none, none)
    with pytest.raises(ValueError, match="loss_positions"):
        PackedBatch(ids, ids, (3,), (-1,), ids, none)
    with pytest.raises(ValueError, match="segment 1 continues 1"):
        PackedBatch(ids, ids, (2, 1), (-1, 1), none, none)
    with pytest.raises(ValueError, match="1 prefixes for 2 segments"):
        PackedBatch(ids, ids, (2, 1), (-1,), none, none)


def test_rounding_up_adds_a_segment_of_stand_ins():
    batch = pack([[5, 6, 7], [8, 9]], [b"\0\1\1", b"\0\1"])
    rounded = round_up(batch, 4)
    assert rounded.token_ids.tolist() == [5, 6, 7, 8, 9, 0, 0, 0] and rounded.positions.tolist()[5:] == [0, 1, 2]
    assert rounded.lengths == (3, 2, 3) and rounded.prefixes == (-1, -1, -1)
    assert rounded.loss_positions.tolist() == [0, 1, 3, 0] and rounded.targets.tolist() == [6, 7, 9, 0]
    assert round_up(rounded, 4) is rounded
    empty = round_up(pack([], []), 2)
    assert empty.tokens == 2 and len(empty.targets) == 0
