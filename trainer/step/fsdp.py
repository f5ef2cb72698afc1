"""The trainer ranks' process group, FSDP2 sharding with float32 master weights, gradients as sums over ranks.

Every rank holds its rows (dimension 0) of every parameter in float32. For the forward they are gathered in the compute
type; gradients are reduced in float32. The step's weights already divide by the global count of tokens, so gradients
are SUMS over ranks, not means: one rank or eight give the same step.

Several replicas (HSDP): each is sharded over neighbouring ranks, those of a node, and only a step's sums of gradients
go from node to node. Each rank saves and sends a part of the rows that its replicas hold too.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rollout.weights.checksum import MODULUS, WORDS
from rollout.weights.layout import own_share
from shared.errors import RunError, SyncMismatch
from shared.model import lora
from shared.model.language_model import LanguageModel
from shared.model.packing import pack
from shared.model.parallel import Cut, Parallel, Peers, SplitExperts, cut_of, whole_shape
from shared.sections import Placement
from trainer.memory import KEEP_WHOLE_BYTES, works_in_place

# FSDP2 takes a second and 40 MB to import, so functions do it: the controller imports this file with the trainers'
# calls (rank.py), and needs none of it
if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def join(
    store: dist.Store, rank: int, world: int, device: torch.device, timeout_s: float, placement: Placement | None = None
) -> DeviceMesh:
    """Form the process group of the trainers (NCCL on CUDA, gloo on CPU) and a mesh over it: "shard", or with several
    replicas "replicate" x "shard"; of tensor peers, over those with the same part of the model.

    store: of this launch attempt, shared by the trainers. A collective that waits longer than timeout_s ends the
    process.
    """
    timeout = datetime.timedelta(seconds=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("trainers", store),
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    replicas, tensor = (placement.replicas or 1, placement.tensor) if placement is not None else (1, 1)
    sizes = {"replicate": replicas, "shard": world // (replicas * tensor), "tensor": tensor}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return mesh["replicate", "shard"] if replicas > 1 and tensor > 1 else mesh["shard"] if tensor > 1 else mesh


def meet(device: torch.device, placement: Placement) -> Parallel:
    """Those with whom this rank shares work, neighbours: tensor and context peers the same batches, others a mixture's
    experts. A collective."""
    peers, same, world = dict[str, Peers](), None, dist.get_world_size()
    for names in (("context", "tensor"), ("experts",)):
        sizes = [getattr(placement, name) for name in names]
        if (count := math.prod(sizes)) > 1:
            mesh = init_device_mesh(device.type, (world // count, *sizes), mesh_dim_names=("rest", *names))
            same = mesh["rest"] if "experts" in names else None
            for name, size in zip(names, sizes, strict=True):
                if size > 1:
                    peers[name] = Peers(mesh.get_group(name), mesh.get_local_rank(name), size)
    return Parallel(**peers, same_experts=same)


def replica_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """All ranks that hold one replica together. mesh: of `join`. A collective at its first call."""
    world, replicas = dist.get_world_size(), mesh.size(0) if mesh.ndim > 1 else 1
    if replicas * mesh.size(mesh.ndim - 1) == world:
        return mesh.get_group("shard")
    whole = init_device_mesh(mesh.device_type, (replicas, world // replicas), mesh_dim_names=("replicate", "replica"))
    return whole.get_group("replica")


def leave() -> None:
    """End the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def fits_whole(model: nn.Module) -> bool:
    """True if gathered weights and unreduced gradients of the whole model (float32, 8 bytes) are few enough to keep."""
    return 8 * sum(parameter.numel() for parameter in model.parameters()) <= KEEP_WHOLE_BYTES


def shard(decoder: LanguageModel, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Shard each layer, of a large model its tables, and the root over the mesh, in place; the parameters become
    DTensors of float32 rows.

    The decoder may be on the meta device (then `materialise` it); parameters that are trained must be float32, those
    with adapters, which are not, become the compute type. Where the rank `works_in_place` nothing else happens.
    """
    if any(True for _ in lora.adapters(decoder)):
        for parameter in decoder.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(compute_dtype)
    name, on_gpu = str(compute_dtype).removeprefix("torch."), mesh.device_type != "cpu"
    world = dist.get_world_size() if dist.is_initialized() else 1
    if works_in_place(world, name, on_gpu or not decoder.rounds_weights):
        decoder.in_place, decoder.compute_dtype = True, compute_dtype
        return
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    reduced = torch.promote_types(compute_dtype, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduced)
    again = not fits_whole(decoder)
    for experts in decoder.modules() if decoder.parallel.experts is not None else ():
        if isinstance(experts, SplitExperts):
            alone = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduced, cast_forward_inputs=False)
            fully_shard(experts, mesh=decoder.parallel.same_experts, mp_policy=alone, reshard_after_forward=again)
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    if again and not decoder.config.tied:  # as parts of the root both tables would be there during the whole step
        head: Any = decoder.head
        fully_shard(decoder.embedding, mesh=mesh, mp_policy=policy)
        fully_shard(head, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # its backward comes next
        head.score = decoder.score
        register_fsdp_forward_method(head, "score")
        decoder.score = head.score  # type: ignore[method-assign]
    fully_shard(decoder, mesh=mesh, mp_policy=policy)
    for module in sharded_modules(decoder):
        # plain SUM: the weights of the step hold the one global denominator, so a mean over ranks would divide twice
        module.set_force_sum_reduction_for_comms(True)
        if mesh.size() > 1:
            module.set_gradient_divide_factor(1.0)  # one rank has nothing to divide, and would copy for it


def trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) of those that training changes: all, or the adapters."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def provide_gradients(model: nn.Module) -> None:
    """Set missing gradients to zero where this is one rank on a CPU, so that backward passes add to them: before the
    first forward of a step, while weights are not gathered.

    Their memory lasts as long as the model: made anew among a step's activations, gradients leave holes that the next
    step's do not fit into. Raises RunError while weights are gathered.
    """
    first = next(model.parameters())
    if sharded_modules(model) and not is_sharded(first):
        raise RunError("a step began while the weights of the one before were still gathered")
    if first.device.type != "cpu" or is_sharded(first):
        return
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients: list[Tensor] | None = getattr(model, "gradient_memory", None)
    if gradients is None:
        gradients = [torch.zeros_like(parameter) for parameter in trained]
        model.gradient_memory = gradients  # type: ignore[assignment]  # a list, neither parameter nor submodule
    for parameter, memory in zip(trained, gradients, strict=True):
        if parameter.grad is None:
            parameter.grad = memory.zero_()


def materialise(decoder: LanguageModel, device: torch.device) -> None:
    """Give a sharded decoder its memory on `device` (contents undefined) and settle FSDP's own buffers.

    FSDP moves unevenly sharded rows into padded memory at the first forward; after this call they stay where they
    are, so that optimiser and weight transfer may hold on to them.
    """
    decoder.to_empty(device=device)
    decoder.settle_buffers()
    with torch.no_grad():
        for parameter in decoder.parameters():
            local(parameter).zero_()
        decoder(pack([], [], device))
    reshard(decoder)
    for name, parameter in decoder.named_parameters():
        if (cut := decoder.cut(name)) is not None:
            parameter.cut = cut  # type: ignore[attr-defined]


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The FSDP modules of a model: the root, its layers, and of a large one embedding and head."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Drop gathered weights, so that the next forward gathers the current ones."""
    for module in sharded_modules(model):
        module.reshard()


def hold(model: nn.Module, last: bool, whole: bool) -> None:
    """Before the forward of a micro-batch: replicas add up their gradients only after the `last` of the step. A model
    that is small enough to be kept `whole` is gathered and reduced only around that one, too.

    The sums are the same; between micro-batches the whole gradient stays on every rank, in float32.
    """
    modules = sharded_modules(model)
    if not whole:
        for module in modules:
            module.set_requires_all_reduce(last, recurse=False)
        return
    for module in modules:
        module.set_requires_gradient_sync(last, recurse=False)
        module.set_reshard_after_backward(last, recurse=False)
    for root in modules[:1]:  # the model itself comes first
        root.set_is_last_backward(last)


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether a tensor is one of FSDP2's, of which this rank holds some rows."""
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The rows of a sharded tensor that this rank holds (it shares their memory); a plain tensor is its own."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def rows_of(tensor: Tensor) -> range:
    """This rank's rows of a parameter sharded on dimension 0 (all of a plain tensor), as numbered in the whole."""
    if not is_sharded(tensor):
        return range(tensor.shape[0])
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    cut = cut_of(tensor)
    first = offset[0] + (cut.first if cut is not None and cut.dim == 0 else 0)
    return range(first, first + shape[0]) if shape[0] else range(0)


def columns_of(tensor: Tensor) -> range:
    """This rank's columns (dimension 1) of a parameter, as numbered in the whole; one of a vector."""
    cut = cut_of(tensor)
    first, count = 0 if cut is None or cut.dim == 0 else cut.first, tensor.shape[1] if tensor.ndim > 1 else 1
    return range(first, first + count)


def part_of(whole: Tensor, tensor: Tensor) -> Tensor:
    """This rank's part of a whole tensor: what belongs into `local` of a parameter."""
    rows, columns = rows_of(tensor), columns_of(tensor)
    own = whole[rows.start : rows.stop]
    return own if whole.ndim < 2 else own[:, columns.start : columns.stop]


def own_rows(tensor: Tensor) -> tuple[range, slice]:
    """The rows of a parameter that this rank saves, and where they are in `local`: replicas save a part each."""
    rows = rows_of(tensor)
    share = own_share(tensor, len(rows)) if is_sharded(tensor) else slice(0, len(rows))
    return rows[share], share


@torch.no_grad()
def compare_replicas(model: nn.Module, when: str) -> None:
    """Compare the sum of the bit patterns of every parameter's rows with those of the ranks that hold the same ones. A
    collective; nothing where there is one replica. when: for the message.

    Raises SyncMismatch naming the parameters that differ, and the ranks: those that differ from most, or both of two.
    """
    first = next(model.parameters())
    if not is_sharded(first) or (mesh := first.device_mesh).ndim == 1:
        return
    names, shards = zip(*((name, local(parameter)) for name, parameter in model.named_parameters()), strict=True)
    sums = torch.stack([one.view(WORDS[one.element_size()]).sum(dtype=torch.int64) for one in shards])
    ranks = dist.get_process_group_ranks(group := mesh.get_group("replicate"))
    dist.all_gather(parts := [torch.empty_like(sums) for _ in ranks], sums, group)
    differ = (by_rank := torch.stack(parts)) != by_rank.mode(dim=0).values
    if not differ.any():
        return
    some = [name for name, one in zip(names, differ.any(dim=0).tolist(), strict=True) if one]
    odd = [str(rank) for rank, one in zip(ranks, differ.any(dim=1).tolist(), strict=True) if one or len(ranks) == 2]
    raise SyncMismatch(
        f"{when}, trainer ranks {', '.join(map(str, ranks))} should hold the same rows, but trainer rank "
        f"{' or '.join(odd)} has other values of {', '.join(some[:5])} ({len(some)} tensors differ): their nodes read "
        "other files, compute otherwise or have faulty memory; go on from the last checkpoint, or set "
        "placement.replicas = 1"
    )


@torch.no_grad()
def add_checksums(part: dict[str, int], names: Iterable[str], device: torch.device) -> dict[str, int]:
    """Add up the ranks' parts of tensors' checksums modulo 2**64, which is how sums of int64 wrap. names: of all
    tensors, in the same order on every rank. Returns the sums on rank 0, nothing elsewhere. A collective."""
    names = list(names)
    signed = [value - MODULUS if (value := part.get(name, 0)) >= MODULUS // 2 else value for name in names]
    dist.reduce(sums := torch.tensor(signed, dtype=torch.int64, device=device), 0)
    return {} if dist.get_rank() else {name: value % MODULUS for name, value in zip(names, sums.tolist(), strict=True)}


def gather_full(parameters: Iterable[tuple[str, nn.Parameter]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield every one of these named parameters whole, in `dtype`. Every rank must run it to the end, since each step
    of it gathers.

    One parameter at a time is whole on the device; what is kept is the caller's choice.
    """
    for name, parameter in parameters:
        values = parameter.detach()
        values = values.full_tensor() if is_sharded(values) else values
        yield name, join_parts(values, cut_of(parameter), whole_shape(parameter)).to(dtype)


def join_parts(values: Tensor, cut: Cut | None, shape: torch.Size) -> Tensor:
    """The whole tensor of this shape, of which `values` are this rank's part. A collective of the peers."""
    if cut is None or cut.size is None:
        return values
    whole = values.new_zeros(shape)
    if cut.copy == 0:
        whole.narrow(cut.dim, cut.first, values.shape[cut.dim]).copy_(values)
    dist.all_reduce(whole.view(WORDS[whole.element_size()]), group=cut.peers.group)  # zeros and bits: exact
    return whole


@torch.no_grad()
def add_copies(model: nn.Module) -> None:
    """Add up the gradients of parameters of which tensor peers have copies: each has its part of them. A collective of
    the peers, once, before the optimiser step; nothing where there are none."""
    shared = [
        (cut, local(one.grad))
        for _, one in trained(model)
        if (cut := cut_of(one)) is not None and cut.copies > 1 and one.grad is not None
    ]
    for cut, gradient in shared:
        if cut.copies < cut.peers.size:
            parts = [torch.empty_like(gradient) for _ in range(cut.peers.size)]
            dist.all_gather(parts, gradient, cut.peers.group)
            first = cut.peers.rank - cut.copy
            gradient.copy_(torch.stack(parts[first : first + cut.copies]).sum(0))
    everywhere = [gradient for cut, gradient in shared if cut.copies == cut.peers.size]
    if everywhere:
        dist.all_reduce(total := torch.cat([one.flatten() for one in everywhere]), group=shared[0][0].peers.group)
        for gradient, values in zip(everywhere, total.split([one.numel() for one in everywhere]), strict=True):
            gradient.copy_(values.view_as(gradient))
