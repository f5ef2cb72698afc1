"""Soft values of prompts: the number itself, which prompts have one, and the file that a resume reads."""

import asyncio
import io
import math
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config import Config
from shared.errors import ConfigError, DataError, NonFinite
from shared.progress import Progress
from shared.types import Completion, Problem, Reward, Verdict
from tests.trainer.test_data import LetterChat
from trainer.data.data_source import DataSource, PromptFormat
from trainer.objectives.registry import complaints
from trainer.soft_values import FILE, drawn_problems, forget_values, read_values, soft_value, soft_values
from trainer.stages import Stages

EASY, HARD = (
    [Problem(f"{name}{i}", letter * (1 + i % 5), "1", pass_rate=rate) for i in range(40)]
    for name, letter, rate in (("e", "x", 0.9), ("h", "y", 0.1))
)


def settings(**given: Any) -> Config:
    base: dict[str, Any] = {
        "steps": 3, "rollout": {"prompts_per_step": 4, "max_completion_tokens": 100, "max_async_level": 1},
        "model": {"max_tokens": 120}, "data": {"system_prompt": ""},
        "objective": {"name": "spo", "beta": 0.5, "value_samples": 4},
    }  # fmt: skip
    return Config.model_validate(base | given)


def source_of(config: Config, problems: list[Problem] | None = None) -> DataSource:
    return DataSource(problems or EASY + HARD, Stages(config), PromptFormat(LetterChat(), config.data))


def test_the_soft_value_by_hand():
    """One right of four at beta 1/2: (1/2) log(3/4 + exp(2) / 4) = 0.477229."""
    assert soft_value([1.0, 0.0, 0.0, 0.0], 0.5) == pytest.approx(0.4772293, abs=1e-6)
    assert soft_value([1.0, 0.0, 0.0], 1e-6) == pytest.approx(1 - 1e-6 * math.log(3), abs=1e-12), "without overflow"
    assert soft_value([1.0, 0.0, 0.5, 0.1], 1e6) == pytest.approx(0.4, abs=1e-6), "near the mean"
    for bad in (math.nan, math.inf):
        with pytest.raises(NonFinite):
            soft_value([1.0, bad], 0.5)


@given(st.lists(st.booleans() | st.floats(-3, 3), min_size=1, max_size=16), st.floats(0.05, 10), st.floats(-2, 2))
def test_soft_values_lie_between_mean_and_maximum_and_move_with_the_rewards(rewards, beta, shift):
    """Of rewards of 0 and 1 it is beta log(1 - p + p exp(1 / beta))."""
    value = soft_value([float(reward) for reward in rewards], beta)
    assert math.fsum(rewards) / len(rewards) - 1e-9 <= value <= max(rewards) + 1e-9
    assert soft_value([reward + shift for reward in rewards], beta) == pytest.approx(value + shift, abs=1e-9)
    p = sum(reward > 0 for reward in rewards) / len(rewards)
    closed = beta * math.log(1 - p + p * math.exp(1 / beta))
    assert soft_value([float(reward > 0) for reward in rewards], beta) == pytest.approx(closed, abs=1e-9)


def test_a_run_values_the_prompts_that_it_draws_and_some_more():
    """Those that fit, each by one id."""
    config, whole = settings(), settings(steps=100)
    source, drawn = source_of(config), drawn_problems(source_of(config), config)
    assert len(drawn) == 25 == len({problem.id for problem in drawn})  # 1.25 * 4 prompts * (3 steps + async_level + 1)
    assert drawn == [source.draw(index).problem for index in range(25)]
    assert {problem.id for problem in drawn_problems(source, whole)} == {problem.id for problem in source.all}
    assert drawn_problems(source, config) == drawn, "wherever the source stands"
    some = drawn_problems(source_of(whole, [*EASY, Problem("long", "z" * 30, "1")]), whole)
    assert {problem.id for problem in some} == {problem.id for problem in EASY}
    with pytest.raises(DataError, match='two different problems have the id "e0"'):
        drawn_problems(source_of(whole, [*EASY, Problem("e0", "other", "2")]), whole)


def test_a_stage_with_other_problems_has_its_own_draws_or_may_draw_any():
    stages: Any = [
        {"name": "easy", "until_step": 2, "data": {"pass_rate": [0.5, 1.0]}},
        {"name": "hard", "data": {"pass_rate": [0.0, 0.5]}, "rollout": {"prompts_per_step": 2, "group_size": 8}},
    ]
    config = settings(stages=stages)
    drawn = [problem.id for problem in drawn_problems(source_of(config), config)]
    assert [name[0] for name in drawn] == ["e"] * 25 + ["h"] * 13  # ceil(1.25 * 2 * 5)
    stages = Stages(config.at_stage(1))
    stages.state.first_index = 9
    late = DataSource(EASY + HARD, stages, PromptFormat(LetterChat(), config.data))
    assert [late.draw(9 + place).problem.id for place in range(13)] == drawn[25:], "whenever it begins"
    solved = settings(stages=[{"name": "one", "until_step": 2}, {"name": "two", "data": {"drop_solved_after": 1}}])
    assert len(drawn_problems(source_of(solved), solved)) == 80, "a later stage that leaves solved problems out"
    assert len(drawn_problems(source_of(config), settings(data={"system_prompt": "", "drop_solved_after": 1}))) == 25


class EngineOfTwo:
    """Every completion has as many tokens as its seed says, one or two."""

    slots = spare = lambda _: 8

    async def sample(self, token_ids: list[int], seeds: list[int], temperature: float) -> list[Completion]:
        assert temperature == 1.0
        return [Completion(group=-1, index=0, seed=seed, token_ids=[1] * (1 + seed % 2)) for seed in seeds]


class Graders:
    """Two tokens are right; what belongs to `silent` is not graded, and `breaks` ends the launch."""

    def __init__(self, silent: Collection[str], breaks: str):
        self.silent, self.breaks, self.asked = silent, breaks, list[str]()

    async def score(self, problem: Problem, completion: Completion) -> tuple[Reward, str]:
        self.asked.append(problem.id)
        if problem.id == self.breaks:
            raise OSError("stop")
        right = len(completion.token_ids) == 2
        verdict = Verdict.TIMEOUT if problem.id in self.silent else Verdict.CORRECT if right else Verdict.WRONG
        return Reward(float(right), 0.0, float(right), 0.0, 0.0, verdict), "text"


def estimate(
    config: Config, *silent: str, problems: list[Problem] = EASY[:6], begun: bool = False, breaks: str = ""
) -> tuple[dict[str, float], list[str]]:
    """(the values, the problems whose completions were graded)"""
    config.run_dir.mkdir(parents=True, exist_ok=True)
    engine, graders, progress = EngineOfTwo(), Graders(silent, breaks), Progress(io.StringIO())
    parts: Any = (config, engine, graders, source_of(config, problems), progress, begun)
    return asyncio.run(soft_values(*parts)), graders.asked


def test_values_are_estimated_kept_and_read_again_under_the_same_settings(tmp_path):
    config = settings(runs_dir=str(tmp_path))
    assert read_values(config) == {}
    values, _ = estimate(config, "e2")
    possible = {round(soft_value([1.0] * right + [0.0] * (4 - right), 0.5), 9) for right in range(5)}
    known = [value for name, value in values.items() if name != "e2"]
    assert values.keys() == {problem.id for problem in EASY[:6]} and len(set(known)) > 1
    assert {round(value, 9) for value in known} <= possible
    assert values["e2"] == pytest.approx(math.fsum(known) / 5), "nothing was graded: the mean of the others"
    assert estimate(config, begun=True) == (values, []), "kept: nobody is asked"
    changes: dict[str, dict[str, Any]] = {
        r"objective\.beta = 0\.1, .* 0\.5": {"objective": {"name": "spo", "beta": 0.1, "value_samples": 4}},
        r"objective\.value_samples = 8, .* 4": {"objective": {"name": "spo", "beta": 0.5}},
        r"reward\.language = 0\.0, .* 0\.1": {"reward": {"language": 0.0}},
        r"data\.system_prompt = x": {"data": {"system_prompt": "x"}},
    }
    for named, changed in changes.items():
        with pytest.raises(ConfigError, match=named):
            read_values(settings(runs_dir=str(tmp_path), **changed))
    more = [*EASY[:6], HARD[0]]
    with pytest.raises(ConfigError, match='1 problems, "h0"'):
        estimate(config, problems=more, begun=True)
    assert estimate(config, problems=more)[0].keys() == {problem.id for problem in more}
    path = config.run_dir / FILE
    whole = path.read_bytes()
    for damaged in (whole[:-9], whole.replace(b'"e0":', b'"e0":1')):
        assert damaged != whole
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="damaged"):
            read_values(config)
    for _ in range(2):
        forget_values(config.run_dir)
        assert read_values(config) == {}
    with pytest.raises(DataError, match="could be graded"):
        estimate(config, *(problem.id for problem in EASY))


def test_what_was_sampled_before_a_stop_is_not_sampled_again(tmp_path, monkeypatch):
    """Two prompts a part; the verifier breaks in the third part, and the next launch goes on there."""
    monkeypatch.setattr("trainer.soft_values.PART", 2)
    config = settings(runs_dir=str(tmp_path))
    whole, _ = estimate(settings(runs_dir=str(tmp_path), name="other"))
    order = [problem.id for problem in drawn_problems(source_of(config, EASY[:6]), config)]
    with pytest.raises(OSError, match="stop"):
        estimate(config, breaks=order[4])
    assert read_values(config).keys() == set(order[:4])
    values, asked = estimate(config)
    assert values == whole and set(asked) == set(order[4:]) and len(asked) == 8


def test_rewards_do_not_change_under_soft_values():
    stages = [{"name": "one", "until_step": 2}, {"name": "two", "reward": {"language": 0.0}}]
    (line,) = complaints(settings(stages=stages))
    assert line.startswith("stages.two changes rewards or objective, but the soft values")
    assert not list(complaints(settings(stages=stages, objective={"name": "agro"})))
