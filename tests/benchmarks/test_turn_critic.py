"""The enumerated game, and critics of its turns."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import guessing, turn_critic
from benchmarks.guessing import Tree, World, grow, true_values, visits
from benchmarks.turn_critic import Row, errors_of, judge, paired, play, prediction_errors, self_prediction, two_layers
from environments.environment import Action, user
from environments.guess import Guess, GuessOptions
from examples.guess.prepare import prepare
from shared.chat import Chat


@pytest.fixture(scope="module")
def tree() -> Tree:
    return grow(numbers=8, guesses=3)


def bisection(tree: Tree) -> Tensor:
    policy = torch.zeros(len(tree.histories), 8, dtype=torch.float64)
    for row, one in zip(policy, tree.histories, strict=True):
        row[(one.low + one.high) // 2 - 1] = 1
    return policy


def test_values_and_visits_by_hand(tree: Tree) -> None:
    assert [sum(len(one.guesses) == length for one in tree.histories) for length in range(3)] == [1, 14, 140]
    uniform = torch.full((len(tree.histories), 8), 1 / 8, dtype=torch.float64)
    assert true_values(tree, uniform)[0] == pytest.approx(1 - (7 / 8) ** 3)
    assert true_values(tree, bisection(tree))[0] == pytest.approx(7 / 8)
    met = visits(tree, bisection(tree))
    assert met.sum() == pytest.approx(1)
    found = {(one.low, one.high): share for one, share in zip(tree.histories, met.tolist(), strict=True) if share}
    eighths = {(1, 8): 8, (1, 3): 3, (5, 8): 4, (1, 1): 1, (3, 3): 1, (5, 5): 1, (7, 8): 2}
    assert found == pytest.approx({left: count / 20 for left, count in eighths.items()})


def test_the_game_is_the_one_that_is_trained(tmp_path: Path) -> None:
    """The example's problem, the environment's words and the prompt of training, whose numbers are digits."""
    prepare(tmp_path, {"numbers": guessing.NUMBERS, "guesses": guessing.GUESSES}, 0)
    first, *_ = map(json.loads, (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines())
    history = guessing.History((3, 12), 4, 11)
    asked, one, higher, two, lower = history.messages(7)
    assert asked["content"] == first["problem"] and (one["content"], two["content"]) == ("3", "12")
    game = Guess()
    game.options = GuessOptions(numbers=guessing.NUMBERS, guesses=guessing.GUESSES)
    game.number, game.left = 7, guessing.GUESSES
    for guess, said in (("3", higher), ("12", lower)):
        assert asyncio.run(game.step(Action(guess, guess))).messages == [user(said["content"])]
    model = guessing.Model(tmp_path / "model")
    chat = Chat(tmp_path / "model")
    assert model.ids(guessing.History((), 1, guessing.NUMBERS)) == chat.render(first["problem"], "")
    prompts = [model.ids(history)]
    policy = guessing.policy_of(model, prompts, model.read(prompts)[1])
    assert policy.shape == (1, guessing.NUMBERS) and float(policy.sum()) == pytest.approx(1)
    assert model.guesses[8:10] == [chat.encode("9"), chat.encode("1") + chat.encode("0")]


def test_variants_are_the_errors_of_predictors_and_targets_have_no_gradient() -> None:
    seeds, hidden = turn_critic.SEEDS, 3
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(seeds, 5, 4, generator=generator, requires_grad=True)
    then = torch.randn(seeds, 5, 4, generator=generator, requires_grad=True)
    actions = torch.randn(seeds, 5, hidden, generator=generator)
    predictors = [
        [*turn_critic.layers(inputs, 6, generator), *turn_critic.layers(6, 4, generator)] for inputs in (4, 4 + hidden)
    ]
    where = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0]]).expand(seeds, -1)
    without, with_actions = prediction_errors(phi, then, actions, predictors, where)
    wanted = []
    seen, later = phi.detach() / phi.detach().norm(dim=-1, keepdim=True), then.detach()[0]
    for row in (0, 1, 3):
        guess = two_layers(seen[:, row : row + 1], predictors[0])[0, 0].detach()
        wanted.append(2 - 2 * float(guess @ later[row] / guess.norm() / later[row].norm()))
    assert float(without[0].detach()) == pytest.approx(sum(wanted) / 3, rel=1e-4)
    found = {name: self_prediction((without, with_actions), name) for name in ("pi", "ac", "var")}
    assert torch.equal(found["pi"], without) and torch.equal(found["ac"], with_actions)
    assert torch.equal(found["var"], with_actions - without)
    found["var"].sum().backward()
    assert then.grad is None and phi.grad is not None and phi.grad[:, 2].eq(0).all() and phi.grad[:, 0].ne(0).any()


class Reader:
    """Stands in for the model where actions are read."""

    guesses = [[number] for number in range(8)]

    def ids(self, history: guessing.History) -> list[int]:
        return [*history.guesses, history.low]

    def read(self, sequences: list[list[int]]) -> tuple[Tensor, Tensor]:
        states = torch.tensor([[float(ids[-1]), float(len(ids)), 1.0] for ids in sequences])
        return states, states


@pytest.mark.parametrize(("variant", "target"), [("", "return"), ("ac", "return"), ("var", "td")])
def test_a_critic_finds_values_that_its_states_contain(
    tree: Tree, variant: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turn_critic, "STEPS", 150)
    monkeypatch.setattr(turn_critic, "SEEDS", 4)
    policy = torch.full((len(tree.histories), 8), 1 / 8, dtype=torch.float64)
    values, met = true_values(tree, policy), visits(tree, policy)
    told = ((values - values.mean()) / values.std()).float()
    for states, least, most in (
        (torch.stack([told, told.square(), told], 1), 0.0, 0.8),
        (torch.zeros(len(told), 3), 0.9, 1.3),
    ):
        world = World(tree, policy, states, values, met, Reader())  # type: ignore[arg-type]
        errors = errors_of(world, play(world, 64, 0), target, variant, 0.1) / world.spread
        print(variant, target, errors)
        assert errors.shape == (turn_critic.SEEDS,) and least < errors.mean() < most


def test_what_the_page_concludes() -> None:
    plain = torch.linspace(0.5, 0.6, turn_critic.SEEDS)
    lower = plain - 0.1 + 0.01 * torch.sin(torch.arange(turn_critic.SEEDS))
    mean, low, high = paired(lower, plain)
    apart = (lower - plain).double()
    assert mean == pytest.approx(float(apart.mean())) and high - mean == pytest.approx(
        2.262 * float(apart.std()) / 10**0.5
    )
    assert low < mean < high < 0
    kinds = [(variant, weight) for variant in turn_critic.LABELS for weight in turn_critic.WEIGHTS]
    rows = [Row("", 0.0, [plain]), *(Row(*kind, [lower if kind == ("ac", 1.0) else plain + 0.1]) for kind in kinds)]
    assert "Lower in all: BYOL-AC at 1." in judge([rows]) and "| BYOL-AC, 1 | 1 | 0 | 0 |" in judge([rows])
    worse = [rows[0], *(Row(*kind, [plain + 0.1]) for kind in kinds)]
    assert "No kind of self-prediction lowers" in judge([rows, worse])
