"""Linears packed by vLLM's own function: packed ahead beside a running engine, exchanged only when told to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

import rollout.engine  # noqa: F401 - prepares the environment for vLLM

from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # isort: skip

from rollout.weights.cpu.loader import CpuWeightLoader
from rollout.weights.layout import plan_layout
from rollout.weights.parameters import plan_targets
from shared.errors import ModelError

SHAPES = [("embed.weight", (8, 16)), ("up.weight", (32, 16)), ("down.weight", (16, 32)), ("norm.weight", (16,))]
IN_PLACE = ("embed.weight", "up.weight")  # the other two are copied


class Model(torch.nn.Module):
    """What is left of a vLLM model after loading: packed linears without plain weights, and plain parameters."""

    def __init__(self) -> None:
        super().__init__()
        for path, shape in SHAPES:
            name = path.partition(".")[0]
            module = self.__dict__["_modules"][name] = torch.nn.Module()
            module.weight = torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
            if name in ("up", "down"):
                dispatch_cpu_unquantized_gemm(module, remove_weight=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up.cpu_linear(x + self.embed.weight[0], self.up.weight, None)
        return self.down.cpu_linear(hidden, self.down.weight, None) * self.norm.weight


class Buffers:
    """Two buffers and one trainer rank."""

    def __init__(self) -> None:
        self.held = [-1, -1]
        self.tensors = [{name: torch.zeros(shape) for name, shape in SHAPES} for _ in range(2)]
        self.broken, self.looks = "", 0

    def write(self, version: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES:
            self.tensors[version % 2][name].copy_(torch.randn(shape, generator=generator))
        self.held[version % 2] = version

    def version_flags(self, buffer: int) -> list[int]:
        self.looks += 1
        return [self.held[buffer]]

    def view(self, buffer: int, names: list[str]) -> torch.Tensor | None:
        return self.tensors[buffer][names[0]] if names[0] in IN_PLACE else None

    def read(self, buffer: int, names: list[str]) -> torch.Tensor:
        if self.broken in names:
            raise OSError(f"{self.broken} is not readable")
        return torch.cat([self.tensors[buffer][name] for name in names])

    def expected(self, version: int, x: torch.Tensor) -> torch.Tensor:
        held = self.tensors[version % 2]
        return ((x + held["embed.weight"][0]) @ held["up.weight"].T @ held["down.weight"].T) * held["norm.weight"]


Scene = tuple[Model, Buffers, CpuWeightLoader]


@pytest.fixture
def scene() -> Iterator[Scene]:
    model, buffers = Model(), Buffers()
    targets = plan_targets(model, plan_layout(SHAPES, torch.float32, 1))
    loader = CpuWeightLoader(targets, buffers, torch.float32)  # type: ignore[arg-type]
    yield model, buffers, loader
    loader.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def packed_ahead(loader: CpuWeightLoader, version: int) -> bool:
    batch = loader.batch
    return batch is not None and batch.version == version and len(batch.linears) == 2


X = torch.linspace(-1, 1, 48).view(3, 16)


def test_a_complete_version_is_packed_ahead_and_changes_the_model_only_when_taken(scene: Scene):
    model, buffers, loader = scene
    for version in range(5):
        before = model(X)
        buffers.write(version, seed=version)
        until(lambda version=version: packed_ahead(loader, version))  # type: ignore[misc]
        assert torch.equal(model(X), before)
        loader.take(version)
        assert torch.allclose(model(X), buffers.expected(version, X), rtol=1e-4, atol=1e-4)


def test_taking_at_once_gives_the_same_model_as_waiting(scene: Scene):
    model, buffers, loader = scene
    for version in range(200):
        buffers.write(version, seed=version)
        loader.take(version)  # at any moment of the other thread's work
    assert torch.allclose(model(X), buffers.expected(199, X), rtol=1e-4, atol=1e-4)


def test_a_version_taken_twice_is_read_twice(scene: Scene):
    model, buffers, loader = scene
    for seed in range(20):
        buffers.write(0, seed)
        loader.take(0)
        assert torch.allclose(model(X), buffers.expected(0, X), rtol=1e-4, atol=1e-4), seed


def test_another_version_than_the_one_packed_ahead_can_be_taken(scene: Scene):
    model, buffers, loader = scene
    buffers.write(0, 0)
    buffers.write(1, 1)
    until(lambda: packed_ahead(loader, 1))
    loader.take(0)
    assert torch.allclose(model(X), buffers.expected(0, X), rtol=1e-4, atol=1e-4)


def test_a_half_written_version_is_left_alone(scene: Scene):
    _, buffers, loader = scene
    buffers.write(0, 0)
    until(lambda: packed_ahead(loader, 0))
    loader.take(0)
    buffers.held[1], buffers.looks = -1, 0
    until(lambda: buffers.looks >= 4)
    assert loader.batch is None


@pytest.mark.parametrize("broken", ["down.weight", "norm.weight"])
def test_what_cannot_be_read_is_an_error_of_take(scene: Scene, broken: str):
    model, buffers, loader = scene
    buffers.write(0, 0)
    loader.take(0)
    buffers.broken = broken
    buffers.write(1, 1)
    with pytest.raises(OSError, match=f"{broken} is not readable"):
        loader.take(1)
    buffers.broken = ""
    loader.take(1)
    assert torch.allclose(model(X), buffers.expected(1, X), rtol=1e-4, atol=1e-4)


def test_a_model_and_a_layout_that_do_not_match_are_refused():
    with pytest.raises(ModelError, match="norm.weight, which the trainers do not send"):
        plan_targets(Model(), plan_layout(SHAPES[:-1], torch.float32, 1))
    with pytest.raises(ModelError, match="no place for .*extra"):
        plan_targets(Model(), plan_layout([*SHAPES, ("extra", (4,))], torch.float32, 1))
