"""The decoder under FSDP2 on two real ranks: same numbers as alone, mixed precision, a rank without work."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shared.model.decoder import Decoder, DecoderConfig, initialise
from tests.packed import pack_from

CONFIG = DecoderConfig("qwen3", 40, 16, 24, 2, 4, 2, 8, 1e-5, 64, tied=True, qk_norm=True, initializer_range=0.3)
WORK = ([[1, 2, 3, 4, 5], [1, 2, 9], [7, 8]], [2, 2, 1]), ([], [])
"""sequences and first targets of each rank; the second has none"""


def make_decoder():
    decoder = Decoder(CONFIG)
    initialise(decoder, 0)
    return decoder


def run_rank(rank, port_file, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        decoder = make_decoder()
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in decoder.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(decoder, mp_policy=policy)
        logprobs, entropy = decoder(pack_from(*WORK[rank]), 0.7)
        assert logprobs.dtype == entropy.dtype == torch.float32
        logprobs.sum().backward()
        gradients = {key: parameter.grad.full_tensor() for key, parameter in decoder.named_parameters()}
        if rank == 0:
            torch.save(gradients, folder / f"{name}.pt")
    dist.barrier()
    os._exit(0)  # as the ranks of a launch end: tearing gloo's threads down can abort a process


@pytest.mark.slow
@pytest.mark.timeout(540)
def test_two_ranks_give_the_gradients_of_one_and_an_idle_rank_keeps_step(tmp_path):
    mp.spawn(run_rank, (tmp_path / "rendezvous", tmp_path), nprocs=2)
    alone = make_decoder()
    alone(pack_from(*WORK[0]), 0.7)[0].sum().backward()
    for name, tolerance in (("float32", 1e-6), ("bfloat16", 0.1)):
        sharded = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        for key, parameter in alone.named_parameters():
            # FSDP2 averages over ranks
            error = (sharded[key] * 2 - parameter.grad).norm() / parameter.grad.norm()
            assert error < tolerance, (name, key, float(error))
