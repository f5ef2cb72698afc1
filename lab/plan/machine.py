"""Describes a cluster: GPUs, memory, FLOP/s, bandwidths, and the shares of them that work is assumed to reach.

Peaks are those of the vendors' data sheets (dense, without sparsity; bandwidths of one direction). The assumptions
(`mfu`, `bandwidth_share`, `step_overhead_s`, `reduction_s`, `usable`) are ours: measure and replace them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """A cluster of equal GPUs on equal nodes, and the efficiency that is assumed of it."""

    gpus: int
    """number of GPUs of the whole run, trainers and engines"""
    memory_bytes: float
    """memory of one GPU"""
    flops_per_s: float
    """dense bfloat16 peak of one GPU"""
    bandwidth: float
    """bandwidth of one GPU's memory, bytes/s"""
    node_bandwidth: float
    """bandwidth of one GPU to the others of its node, one direction, bytes/s"""
    network_bandwidth: float
    """bandwidth of one GPU's part of the network between nodes, one direction, bytes/s"""
    node_gpus: int = 8
    mfu: float = 0.4
    """share of the peak that training, prefill and large decode batches reach"""
    bandwidth_share: float = 0.8
    """share of the memory bandwidth that decoding reaches"""
    step_overhead_s: float = 0.002
    """time of a decode step besides reading and computing: scheduling, sampling, launches"""
    reduction_s: float = 1e-5
    """latency of one all-reduce over the GPUs of an engine; there are two in every layer"""
    usable: float = 0.9
    """share of the memory that a rank may use; the rest is for libraries and fragmentation"""

    @property
    def usable_bytes(self) -> float:
        """Usable memory of one GPU, bytes."""
        return self.usable * self.memory_bytes

    @property
    def one_node(self) -> bool:
        """Whether all GPUs are in one node."""
        return self.gpus <= self.node_gpus

    def compute_s(self, flops: float, gpus: int) -> float:
        """Return the time of `flops` operations shared by `gpus` GPUs, seconds."""
        return flops / (gpus * self.flops_per_s * self.mfu)

    def ring_bandwidth(self, ranks: int) -> float:
        """Return the bytes/s at which each of `ranks` neighbouring GPUs receives its part of an all-gather: the node's
        bandwidth within a node; between nodes that of all network cards of a node together, limited by the node's."""
        if ranks <= self.node_gpus:
            return self.node_bandwidth
        return min(self.node_bandwidth, self.node_gpus * self.network_bandwidth)


@dataclass(frozen=True)
class Card:
    """The data sheet of a GPU, and the network that it is usually sold with."""

    memory_bytes: float
    flops_per_s: float
    bandwidth: float
    node_bandwidth: float
    network_bandwidth: float


CARDS = {
    "a100-40": Card(40e9, 312e12, 1.555e12, 300e9, 25e9),
    "a100-80": Card(80e9, 312e12, 2.039e12, 300e9, 25e9),
    "h100": Card(80e9, 989e12, 3.35e12, 450e9, 50e9),
    "h200": Card(141e9, 989e12, 4.8e12, 450e9, 50e9),
}
"""SXM cards; the network is one card for each GPU: 200 Gb/s beside an A100, 400 Gb/s beside an H100 or H200"""
