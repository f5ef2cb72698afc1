"""The game of guessing a number, enumerated: every history with a policy's own probabilities, so that the true value of
each is known."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

NUMBERS, GUESSES = 16, 4


class History(NamedTuple):
    """Guesses so far, and the numbers that their answers leave."""

    guesses: tuple[int, ...]
    low: int
    high: int

    def after(self, guess: int) -> tuple[History | None, History | None]:
        """Return the histories after "higher" and "lower"; None for one that cannot happen."""
        there = (*self.guesses, guess)
        above, below = (max(self.low, guess + 1), self.high), (self.low, min(self.high, guess - 1))
        return tuple(History(there, *left) if left[0] <= left[1] else None for left in (above, below))  # type: ignore[return-value]

    def messages(self, number: int) -> list[dict[str, str]]:
        """Return the conversation of an episode with that number."""
        found = [{"role": "user", "content": f"Find the number from 1 to {NUMBERS}."}]
        for guess in self.guesses:
            found.append({"role": "assistant", "content": str(guess)})
            found.append({"role": "user", "content": "higher" if guess < number else "lower"})
        return found


class Tree(NamedTuple):
    """All histories before a guess, by their length."""

    histories: list[History]
    children: Tensor
    """[histories, NUMBERS, 2] places of the histories after a guess; -1: cannot happen, or no guess is left"""
    shares: Tensor
    """[histories, NUMBERS, 3] probability of "higher", "lower" and of the number itself after a guess"""


def grow(numbers: int = NUMBERS, guesses: int = GUESSES) -> Tree:
    """Enumerate the histories of the game."""
    histories = [History((), 1, numbers)]
    ways: list[tuple[History | None, History | None]] = []
    for one in histories:
        found = [one.after(guess) for guess in range(1, numbers + 1)]
        ways += found
        if len(one.guesses) + 1 < guesses:
            histories += [then for both in found for then in both if then]
    place = {one: number for number, one in enumerate(histories)}
    counts = torch.tensor([[then.high - then.low + 1 if then else 0 for then in both] for both in ways])
    children = torch.tensor([[place.get(then, -1) if then else -1 for then in both] for both in ways])
    widths = torch.tensor([one.high - one.low + 1 for one in histories], dtype=torch.float64)
    shares = counts.view(-1, numbers, 2) / widths[:, None, None]
    found_it = 1 - shares.sum(-1, keepdim=True)
    return Tree(histories, children.view(-1, numbers, 2), torch.cat([shares, found_it], -1))


def true_values(tree: Tree, policy: Tensor) -> Tensor:
    """Return [histories] the probability that the number is found from there on. policy: [histories, NUMBERS]."""
    values = torch.zeros(len(tree.histories) + 1, dtype=torch.float64)  # the last one: nothing is left
    lengths = torch.tensor([len(one.guesses) for one in tree.histories])
    for length in reversed(range(int(lengths.max()) + 1)):
        now = (lengths == length).nonzero().squeeze(1)
        found = tree.shares[now, :, 2] + (tree.shares[now, :, :2] * values[tree.children[now]]).sum(-1)
        values[now] = (policy[now] * found).sum(-1)
    return values[:-1]


def visits(tree: Tree, policy: Tensor) -> Tensor:
    """Return [histories] how often the policy meets each, as a distribution."""
    found = torch.zeros(len(tree.histories) + 1, dtype=torch.float64)
    found[0] = 1
    lengths = torch.tensor([len(one.guesses) for one in tree.histories])
    for length in range(int(lengths.max())):
        now = (lengths == length).nonzero().squeeze(1)
        flow = found[now, None, None] * policy[now, :, None] * tree.shares[now, :, :2]
        found.index_add_(0, tree.children[now].flatten() % len(found), flow.flatten())
    found[-1] = 0
    return (found / found.sum())[:-1]


class Model:
    """A policy; every question is a forward pass."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
        self.network = network.eval()
        self.guesses = [self.tokens(str(one)) for one in range(1, NUMBERS + 1)]

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def ids(self, history: History) -> list[int]:
        """Return the tokens before a guess."""
        messages = history.messages(history.low)
        return self.tokens(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    @torch.no_grad()
    def read(self, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return the states [sequences, hidden] and logits [sequences, vocabulary] of the last tokens."""
        states, logits = [], []
        order = sorted(range(len(sequences)), key=lambda place: len(sequences[place]))
        for start in range(0, len(order), 512):
            chosen = [sequences[place] for place in order[start : start + 512]]
            ids = torch.zeros(len(chosen), max(map(len, chosen)), dtype=torch.long)  # padding behind is never seen
            for row, tokens in zip(ids, chosen, strict=True):
                row[: len(tokens)] = torch.tensor(tokens)
            ends = torch.tensor([len(tokens) - 1 for tokens in chosen])
            found: Any = self.network(ids, output_hidden_states=True)
            states.append(found.hidden_states[-1][torch.arange(len(chosen)), ends])
            logits.append(found.logits[torch.arange(len(chosen)), ends])
        back = torch.tensor(order).argsort()
        return torch.cat(states)[back], torch.cat(logits)[back]


class World(NamedTuple):
    """A policy in the game."""

    tree: Tree
    policy: Tensor
    """[histories, NUMBERS]"""
    states: Tensor
    """[histories, hidden], centred and scaled to unit variance over the histories that the policy meets"""
    values: Tensor
    """[histories]"""
    met: Tensor
    """[histories] a distribution"""
    model: Model

    @property
    def spread(self) -> float:
        """Standard deviation of the values of the histories that the policy meets."""
        mean = (self.met * self.values).sum()
        return float((self.met * (self.values - mean).square()).sum().sqrt())


def policy_of(model: Model, prompts: Sequence[list[int]], logits: Tensor) -> Tensor:
    """Return [prompts, NUMBERS] the probabilities of guesses, whose tokens are digits. logits: of first tokens."""
    (one,) = model.guesses[0]
    first = logits[:, [ids[0] for ids in model.guesses[:9]]].double().softmax(-1)
    _, after_one = model.read([[*ids, one] for ids in prompts])
    ends = [model.tokenizer.eos_token_id, *(ids[1] for ids in model.guesses[9:])]
    second = after_one[:, ends].double().softmax(-1)
    return torch.cat([first[:, :1] * second[:, :1], first[:, 1:], first[:, :1] * second[:, 1:]], -1)


def explore(tree: Tree, folder: Path) -> World:
    """Ask a policy about every history."""
    model = Model(folder)
    prompts = [model.ids(one) for one in tree.histories]
    states, logits = model.read(prompts)
    policy = policy_of(model, prompts, logits)
    met = visits(tree, policy)
    mean = (met[:, None] * states).sum(0)
    scale = (met[:, None] * (states - mean).square()).sum(0).sqrt()
    scaled = ((states - mean) / scale.clamp_min(1e-6)).float()
    return World(tree, policy, scaled, true_values(tree, policy), met, model)
