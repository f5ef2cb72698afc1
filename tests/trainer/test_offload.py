"""Memory that moves to the host and back: the same objects, the same bits, nothing in between."""

import pytest
import torch

from shared.model.decoder import Decoder, initialise
from shared.sections import Optimiser
from tests.packed import pack_from
from tests.trainer.rank_data import SHAPE
from trainer.step import optimiser
from trainer.step.offload import HostMemory


def trained(turns: bool) -> list[torch.Tensor]:
    """Weights and moments after three steps, with or without turns between them."""
    decoder, host = Decoder(SHAPE), HostMemory()
    initialise(decoder, seed=1)
    made = optimiser.make_optimiser(decoder, Optimiser(learning_rate=1e-2))
    views = [parameter.detach()[:1] for parameter in decoder.parameters()]  # as the weight transfer holds them
    for step in range(3):
        (-decoder(pack_from([[1, 2, 3 + step, 4]], [1]), 1.0)[0].sum()).backward()
        optimiser.update(decoder, made, 1e-2)
        if turns:
            moments = [value for state in made.state.values() for value in state.values()]
            away = host.offload([*decoder.parameters(), *moments])
            assert away == 3 * 4 * sum(each.numel() for each in decoder.parameters()), (
                "weights and two moments, each once"
            )
            assert all(parameter.untyped_storage().nbytes() == 0 for parameter in decoder.parameters())
            host.onload()
            host.onload()  # does nothing
    for view, parameter in zip(views, decoder.parameters(), strict=True):
        assert torch.equal(view, parameter[:1]) and view.data_ptr() == parameter.data_ptr()
    return [*decoder.parameters(), *(state[key] for state in made.state.values() for key in ("exp_avg", "exp_avg_sq"))]


def test_steps_with_turns_between_them_are_the_same_to_the_bit():
    for plain, turned in zip(trained(False), trained(True), strict=True):
        assert torch.equal(plain.view(torch.int32), turned.view(torch.int32))


def test_every_bit_comes_back():
    """NaN with its payload, negative zero, and memory that two tensors share. On a CPU torch cannot give back memory
    that numpy has seen: it becomes NaN meanwhile."""
    bits = torch.randint(-(2**31), 2**31 - 1, (1000,), dtype=torch.int32)
    whole, shown, host = bits.clone().view(torch.float32), torch.ones(10), HostMemory()
    half, number = whole[:500], torch.tensor(7.0)
    shown.numpy()
    for _ in range(2):
        assert host.offload([half, whole, number, shown]) == 4040 and float(number) == 7.0 and shown.isnan().all()
        host.onload()
        assert torch.equal(whole.view(torch.int32), bits) and torch.equal(half.view(torch.int32), bits[:500])
        assert (shown == 1).all()


@pytest.mark.gpu
def test_on_a_gpu_the_memory_is_free_meanwhile():
    tensor = torch.randn(64 << 20, device="cuda")
    before, expected, host = torch.cuda.memory_reserved(), tensor.cpu(), HostMemory()
    host.offload([tensor])
    assert torch.cuda.memory_reserved() <= before - (256 << 20)
    host.onload()
    assert torch.equal(tensor.cpu(), expected)
