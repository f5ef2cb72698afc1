"""Rewards by name: the ready ones, weights, the transform, failures, and plug-in files."""

from __future__ import annotations

import asyncio
import math
import re
import tomllib
from pathlib import Path

import pytest

from shared.config import Config
from shared.errors import ConfigError
from shared.sections import RewardWeights
from shared.types import Problem, Reward, Verdict
from verify.builtin_rewards import CosineOptions, cosine_length, repeated_share
from verify.chosen_rewards import choose
from verify.math.plain import decide
from verify.plugins import log_sigmoid, register
from verify.reward import CompletionScorer, score

PROBLEM = Problem("1", "Tom has 5 apples. Tom buys 3 more. How many apples does Tom have now?", "8")
GOOD = "<think>Tom starts with 5 and buys 3 more: 5+3=8.</think>The answer is \\boxed{8}."
BAD = GOOD.replace("boxed{8}", "boxed{9}")


class Fast:
    async def check(self, ground_truth: str, answer: str) -> Verdict:
        return decide(ground_truth, answer) or Verdict.UNVERIFIABLE


class Programs:
    """A code verifier that saw three of four tests pass."""

    verdict, share, reason = Verdict.WRONG, 0.75, "printed 3"

    async def run(self, problem: Problem, source: str, language: str, group: int) -> Programs:
        assert (source, language) == ("int main() {}\n", "cpp")
        return self


def settings(**changes: object) -> RewardWeights:
    return RewardWeights.model_validate({"length_max": 100, "overlong_buffer": 20, **changes})


def reward(response: str, chosen: RewardWeights, tokens: int = 50, problem: Problem = PROBLEM) -> Reward:
    return asyncio.run(CompletionScorer(chosen, Fast(), Programs()).score(problem, response, tokens))


def plugin(folder: Path, body: str) -> str:
    path = folder / "mine.py"
    path.write_text(f"import asyncio\nfrom verify.plugins import Case, reward\n\n{body}\n")
    return str(path)


def test_share_of_tests_is_a_reward_and_reported_beside_the_verdict() -> None:
    task = Problem("c", "Write a program that reads a number and prints it twice.", "", domain="code")
    response = "<think>We only need to print it twice.</think>Here it is:\n```cpp\nint main() {}\n```"
    plain = reward(response, settings(), problem=task)
    assert (plain.correctness, plain.share, plain.verdict) == (0.0, 0.75, Verdict.WRONG)
    partial = reward(response, settings(correctness=0, extra={"tests_passed": 0.9}), problem=task)
    assert partial.extra == {"tests_passed": pytest.approx(0.675)}
    assert partial.total == pytest.approx(0.1 + 0.675 + 0.1)


def test_code_without_a_code_verifier_is_not_graded() -> None:
    task = Problem("c", "Print a number.", "", domain="code")
    found = asyncio.run(
        CompletionScorer(settings(), Fast()).score(task, "<think>We print one.</think>\n```py\nprint(1)\n```", 5)
    )
    assert found.verdict is Verdict.UNVERIFIABLE and "no sandbox" in found.reason


@pytest.mark.parametrize(
    ("tokens", "right", "value"),
    [
        (0, True, 1.0), (50, True, 0.75), (99, True, 0.5), (0, False, -1.0), (50, False, -0.5), (99, False, 0.0),
        (100, True, -1.0), (100, False, -1.0), (5000, True, -1.0),
    ],
)  # fmt: skip
def test_cosine_length(tokens: int, right: bool, value: float) -> None:
    assert cosine_length(tokens, 100, right, CosineOptions()) == pytest.approx(value, abs=1e-3)


def test_cosine_length_of_the_paper() -> None:
    """Values of 2502.03373: right 2 to 1, wrong -10 to 0; a quarter of the way is 0.8536 of the short end."""
    paper = CosineOptions(right=(2, 1), wrong=(-10, 0))
    assert cosine_length(25, 100, True, paper) == pytest.approx(1.853553)
    assert cosine_length(25, 100, False, paper) == pytest.approx(-8.535534)


def test_repeated_share() -> None:
    assert repeated_share("a b c d", 2) == 0.0
    assert repeated_share("a b a b a b", 2) == pytest.approx(1 - 2 / 5)
    assert repeated_share("wait " * 101, 2) == pytest.approx(0.99)
    assert repeated_share("我们我们我们", 2) == pytest.approx(1 - 2 / 5)
    assert repeated_share("one two", 20) == 0.0


def test_repetition_costs_at_most_its_weight() -> None:
    loop = GOOD.replace("</think>", " Tom has apples and buys more of them every day." * 40 + "</think>")
    found = reward(loop, settings(extra={"repetition": 0.05}))
    assert -0.05 < found.extra["repetition"] < -0.045
    assert reward(GOOD, settings(extra={"repetition": 0.05})).extra["repetition"] == 0.0


def test_broken_format_earns_the_least_of_every_extra() -> None:
    chosen = settings(extra={"repetition": 0.5, "cosine_length": 0.3, "tests_passed": 0.2})
    broken = reward("The answer is \\boxed{8}.", chosen)
    assert broken.extra == {"repetition": -0.5, "cosine_length": -0.3, "tests_passed": 0.0}
    assert broken.total == pytest.approx(-0.8)
    assert reward(BAD, chosen, tokens=100).total > broken.total


def test_log_sigmoid_transform() -> None:
    assert log_sigmoid(0.5, 0.5) == pytest.approx(-math.log(2))
    assert log_sigmoid(1e9, 0) == 0.0 and log_sigmoid(-1e9, 0) == -1e9
    chosen = settings(extra={"tests_passed": 2.0}, options={"tests_passed": {"log_sigmoid": 0.5}})
    right, wrong = reward(GOOD, chosen), reward(BAD, chosen)
    assert right.extra["tests_passed"] == pytest.approx(2 * -math.log(1 + math.exp(-0.5)))
    assert wrong.extra["tests_passed"] == pytest.approx(2 * -math.log(1 + math.exp(0.5)))
    assert reward("broken", chosen).total == wrong.extra["tests_passed"] < wrong.total


def test_unknown_name_is_one_error_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"reward\.extra\.cosine_lenght: .*did you mean cosine_length\?"):
        choose(settings(extra={"cosine_lenght": 1}))
    with pytest.raises(ConfigError, match=r"write reward\.language = 0\.2"):
        choose(settings(extra={"language": 0.2}))
    with pytest.raises(ConfigError, match=r"reward\.plugins"):
        choose(settings(extra={"zzzzzz": 0.2}))


def test_each_reward_has_options_of_its_own() -> None:
    four, many = (
        settings(extra={"repetition": 1}, options={"repetition": {"words": 4}}),
        settings(extra={"repetition": 1}),
    )
    echo = GOOD.replace("</think>", " Tom buys 3 more. Tom buys 3 more.</think>")
    assert reward(echo, four).extra["repetition"] < reward(echo, many).extra["repetition"] == 0
    steep = settings(extra={"cosine_length": 1.0}, options={"cosine_length": {"wrong": [-3, 0]}})
    assert reward(BAD, steep, tokens=0).extra["cosine_length"] == reward("broken", steep).total == -3


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"repetition": {"word": 4}}, "reward.options.repetition.word: there is no such option; repetition has "
                                      "log_sigmoid, words"),
        ({"repetition": {"words": 0}}, "reward.options.repetition.words = 0: must be a whole number, at least 1"),
        ({"tests_passed": {"words": 3}}, "reward.options.tests_passed.words: there is no such option; tests_passed has "
                                         "log_sigmoid"),
        ({"language": {"undetermined": "free"}}, 'reward.options.language.undetermined = "free": must be one of '
                                                 '"neutral", "nothing", "bonus"'),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_line(options: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as found:
        choose(settings(extra={"repetition": 1, "tests_passed": 1}, options=options))
    assert str(found.value) == line


def test_a_reward_of_the_users_own_has_options(tmp_path: Path) -> None:
    mine = plugin(tmp_path, """
from verify.plugins import RewardOptions

class Mine(RewardOptions):
    share: float = 0.5

@reward("mine", options=Mine)
def mine(case: Case, options: Mine) -> float:
    return options.share""")  # fmt: skip
    chosen = settings(extra={"mine": 2.0}, plugins=[mine], options={"mine": {"share": 0.25}})
    assert reward(GOOD, chosen).extra["mine"] == 0.5
    with pytest.raises(
        ConfigError, match=r"^reward\.options\.mine\.shar: there is no such option; mine has log_sigmoid, sh"
    ):
        choose(settings(extra={"mine": 2.0}, plugins=[mine], options={"mine": {"shar": 0.25}}))


def test_name_of_another_reward_cannot_be_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'repetition' exists already"):
        choose(settings(plugins=[plugin(tmp_path, '@reward("repetition")\ndef f(case): return 0')]))
    with pytest.raises(ConfigError, match="Magistral's own"):
        register("format", lambda _: lambda case: 0.0, lowest=lambda _: 0.0)


def test_blocking_score_takes_rows_and_settings_and_any_thread() -> None:
    row = {"problem": PROBLEM.text, "answer": 8}
    assert score(row, GOOD).total == pytest.approx(1.1)
    config = Config.model_validate({"rollout": {"max_completion_tokens": 100}, "reward": {"overlong_buffer": 20}})
    assert score(PROBLEM, GOOD, config, tokens=90).total == pytest.approx(1.05)
    assert score(PROBLEM, GOOD.removeprefix("<think>"), config, opened=True).total == pytest.approx(1.1)

    async def inside_a_loop() -> Reward:
        return score(PROBLEM, BAD, settings())

    assert asyncio.run(inside_a_loop()).total == pytest.approx(0.2)


def test_undetermined_language_earns_what_the_setting_says() -> None:
    wordless = "<think>$5+3=8$</think>\\boxed{8}"
    half = "<think>$5+3=8$</think>The answer is \\boxed{8}."
    earned = {
        mode: [
            reward(text, settings(options={"language": {"undetermined": mode}})).language
            for text in (wordless, half, GOOD)
        ]
        for mode in ("neutral", "nothing", "bonus")
    }
    assert earned == {"neutral": [0, 0.1, 0.1], "nothing": [0, 0, 0.1], "bonus": [0.1, 0.1, 0.1]}


def test_example_of_the_manual_runs(tmp_path: Path, root: Path) -> None:
    """The ten lines of docs/rewards.md, as they stand there."""
    manual = (root / "docs" / "rewards.md").read_text(encoding="utf-8")
    code, toml = re.findall(r"```(?:python|toml) example\n(.*?)```", manual, re.DOTALL)
    assert len(code.strip().splitlines()) <= 10
    (tmp_path / "my_rewards.py").write_text(code)
    table = tomllib.loads(toml)["reward"]
    table["plugins"] = [str(tmp_path / name) for name in table["plugins"]]
    chosen = settings(**table)
    short, long = reward(GOOD, chosen), reward(GOOD + " And so on." * 200, chosen)
    assert short.extra["summary_is_short"] == pytest.approx(0.1)
    assert long.extra["summary_is_short"] == 0.0
