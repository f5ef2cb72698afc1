"""The value head of DRO by itself: what it says, how it learns, and that a checkpoint holds all of it."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.errors import CheckpointError
from trainer.checkpoint.safetensors_file import written
from trainer.step.value_head import FILE, ValueHead

STATES = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.5, -1.0, 0.0, 2.0]])
TARGETS = torch.tensor([1.0, -0.5])


def learn(head: ValueHead, steps: int) -> None:
    """Least squares on the two states."""
    for _ in range(steps):
        (head(STATES) - TARGETS).square().sum().backward()
        head.step()


def values_of(head: ValueHead) -> list[float]:
    return [*head.weight.tolist(), head.bias.item()]


def test_it_is_linear_in_the_state_over_the_root_of_its_size_and_never_moves_the_policy():
    head, states = ValueHead(4, 0.1), STATES.clone().requires_grad_()
    assert head(STATES).tolist() == [0.0, 0.0]
    head(states).sum().backward()
    assert states.grad is None
    assert head.weight.grad is not None and head.weight.grad.tolist() == [0.75, 0.5, 1.5, 3.0]  # column sums / 2
    with torch.no_grad():
        head.weight.copy_(torch.tensor([1.0, 0.0, -1.0, 2.0]))
        head.bias.fill_(0.25)
    # (1 - 3 + 8) / 2 + 1/4 and (1/2 + 4) / 2 + 1/4
    assert head(STATES).tolist() == [3.25, 2.5]
    assert head(torch.zeros(0, 4)).shape == (0,) and head(STATES.bfloat16()).dtype == torch.float32


def test_a_step_is_that_of_adamw_without_decay():
    head = ValueHead(4, 0.1)
    weight, bias = (torch.zeros(shape, requires_grad=True) for shape in (4, ()))
    expected = torch.optim.AdamW([weight, bias], lr=0.1, weight_decay=0.0)
    for _ in range(3):
        learn(head, 1)
        (STATES @ weight / 2 + bias - TARGETS).square().sum().backward()
        expected.step()
        expected.zero_grad()
    torch.testing.assert_close([head.weight, head.bias], [weight, bias])
    assert head.weight.grad is None and head.weight.abs().min() > 0.01


def test_without_a_gradient_it_stays_and_a_reset_forgets_that_there_were_steps():
    """As after SFT: AdamW's first true step must again be of the size of the learning rate."""
    head = ValueHead(4, 0.1)
    for _ in range(50):
        head.step()
    assert values_of(head) == [0.0] * 5
    head.reset()
    fresh = ValueHead(4, 0.1)
    for each in (head, fresh):
        learn(each, 1)
    assert values_of(head) == values_of(fresh)
    assert [abs(value) for value in values_of(head)] == pytest.approx([0.1] * 5, rel=1e-4)


@pytest.mark.parametrize("steps", [0, 3])
def test_what_is_saved_goes_on_bitwise_the_same(tmp_path, steps):
    """With the learning rate of the settings, not of the checkpoint."""
    first, second, slower = ValueHead(4, 0.1), ValueHead(4, 0.1), ValueHead(4, 0.02)
    learn(first, steps)
    assert first.save(tmp_path) == {FILE: written(tmp_path / FILE)}
    for head in (second, slower):
        head.load(tmp_path)
        assert values_of(head) == values_of(first)
    for head in (first, second, slower):
        learn(head, 1)
    assert values_of(second) == values_of(first) and first.weight.abs().max() > 0.05
    if steps == 0:
        assert [abs(value) for value in values_of(slower)] == pytest.approx([0.02] * 5, rel=1e-4)


def test_a_file_that_is_not_there_damaged_or_of_another_model_and_a_folder_without_room_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="goes on only from its own checkpoints"):
        ValueHead(4, 0.1).load(tmp_path)
    ValueHead(5, 0.1).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"another model: weight has shape \(5,\)"):
        ValueHead(4, 0.1).load(tmp_path)
    tensors = load_file(tmp_path / FILE)
    save_file({"bias": tensors["bias"]}, tmp_path / FILE)
    with pytest.raises(CheckpointError, match="weight"):
        ValueHead(5, 0.1).load(tmp_path)
    (tmp_path / FILE).write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        ValueHead(4, 0.1).load(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be written"):
        ValueHead(4, 0.1).save(tmp_path / "absent")
