"""Linears packed by vLLM's own function: packed ahead beside a running engine, exchanged only when told to."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


@contextmanager
def loading() -> Iterator[Scene]:
    model, buffers = Model(), Buffers()
    targets = plan_targets(model, plan_layout(SHAPES, torch.float32, 1))
    loader = CpuWeightLoader(targets, buffers, torch.float32)  # type: ignore[arg-type]
    yield model, buffers, loader
    loader.close()


@pytest.fixture
def scene():
    with loading() as made:
        yield made


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def packed_ahead(loader: CpuWeightLoader) -> bool:
    return (batch := loader.batch) is not None and len(batch.linears) == 2


X = torch.linspace(-1, 1, 48).view(3, 16)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=20))
def test_the_model_becomes_what_is_taken_and_only_then(steps):
    """Taken at any moment of the other thread's work, or when it has packed ahead; the newest version, or the one
    before; once, or again with other values."""
    with loading() as (model, buffers, loader):
        version = -1
        for wait, behind, again in steps:
            for _ in range(1 + behind):
                version += 1
                buffers.write(version, seed=version)
            before = model(X)
            if wait:
                until(lambda: packed_ahead(loader))
            assert torch.equal(model(X), before)
            loader.take(version - behind)
            assert torch.allclose(model(X), buffers.expected(version - behind, X), rtol=1e-4, atol=1e-4)
            if again:
                buffers.write(version - behind, seed=1000 + version)
                loader.take(version - behind)
                assert torch.allclose(model(X), buffers.expected(version - behind, X), rtol=1e-4, atol=1e-4)


def test_a_half_written_version_is_left_alone(scene):
    _, buffers, loader = scene
    buffers.write(0, 0)
    until(lambda: packed_ahead(loader))
    loader.take(0)
    buffers.held[1], buffers.looks = -1, 0
    until(lambda: buffers.looks >= 4)
    assert loader.batch is None


@pytest.mark.parametrize("broken", ["down.weight", "norm.weight"])
def test_what_cannot_be_read_is_an_error_of_take(scene, broken):
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


def test_weights_are_packed_ahead_by_as_many_threads_as_the_model_was_loaded_with(monkeypatch):
    """OpenMP counts them for each thread; with another number oneDNN packs them in another order than it multiplies."""
    calls = list[tuple[str, int]]()
    monkeypatch.setattr(torch._C, "set_num_threads", lambda count: calls.append((current_thread().name, count)))
    with loading():
        until(lambda: bool(calls))
    assert calls == [("weight packing", torch.get_num_threads())]
