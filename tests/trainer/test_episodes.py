"""What stands between two turns: limits, what is resumed, waves in synchronous mode, and what stands idle because
environments have not answered; episodes as people see them, and what is not measured of them."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Sequence
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
from msgspec.structs import replace

from rollout.client import EngineClient
from shared.chat import Chat
from shared.config import Config
from shared.metrics import METRICS
from shared.progress import Progress, plain
from shared.sections import Data
from shared.types import Completion, Group, Problem, Prompt, Reward, Turn, TurnText, Verdict, VersionSpan
from tests.environments.test_host import WRONG, play, playing, prompt_of, sampled
from tests.shared.test_turns import ENDS, chat_of
from tests.tables import read_table
from tests.trainer.test_evaluation import logger_of
from trainer.checkpoint.ledger_file import LedgerState
from trainer.controller import TrainingLoop
from trainer.data.data_source import PromptFormat
from trainer.episodes import turns_of
from trainer.evaluation import EvaluationRecord, Sampled, summarise
from trainer.learner import Learner
from trainer.ledger import Ledger, with_unfinished
from trainer.objectives.objective import train_sequences
from trainer.objectives.registry import objective_of
from trainer.report import before_after_table, sample_panels
from trainer.run_log import RunLogger
from trainer.stages import Stages
from trainer.step_metrics import rollout_metrics
from trainer.timing import IdleSeats
from verify.scorer import reward_of

PROBLEM = Problem("p", "Find the number.", "", environment="guess")


@pytest.mark.parametrize(("settings", "kind", "turns", "reason"), [
    ({"max_turns": 1}, "goes on", 1, "stop"), ({"max_turns": 3}, "goes on", 3, "stop"),
    ({"max_turns": 50, "max_tokens": 180}, "goes on", 0, "length"),
    ({"max_turns": 50, "max_completion_tokens": 9}, "goes on", 3, "length"),
    ({"max_turns": 50, "episode_s": 0.8}, "slow", 0, "timeout"),
])  # fmt: skip
def test_limits_end_an_episode(tmp_path, settings, kind, turns, reason):
    async def run() -> None:
        async with playing(tmp_path, **settings) as episodes:
            episode = await play(episodes, kind)
            assert episode.finish_reason == reason, episode
            assert len(episode.turns) == (turns or len(episode.turns))
            assert episode.turns[-1].end == len(episode.token_ids)
            tokens = len(prompt_of(episodes, kind).token_ids) + len(episode.token_ids)
            assert tokens <= episodes.config.model.max_tokens
            assert episode.sampled_tokens <= episodes.config.rollout.max_completion_tokens
            if "max_tokens" in settings:  # another turn of the same size would not have fitted
                assert tokens + episode.turns[1].end - episode.turns[0].end > settings["max_tokens"]

    asyncio.run(run())


@pytest.mark.parametrize("end", ["length", "abort"])
def test_a_turn_that_is_cut_or_given_up_ends_the_episode(tmp_path, end):
    async def run() -> None:
        async with playing(tmp_path) as episodes:
            prompt = await episodes.open(prompt_of(episodes, "goes on"))
            first = await episodes.advance(prompt, episodes.end_turn(await sampled(Completion(0, 0, 7), episodes.chat)))
            cut = await episodes.advance(prompt, episodes.end_turn(await sampled(first, episodes.chat, end=end)))
            assert cut.finish_reason == end and [turn.reward for turn in cut.turns] == [1.0, 0.0]
            assert not episodes.host.alive((0, 0)), "its instance is closed"

    asyncio.run(run())


def test_an_episode_goes_on_between_turns_and_within_one_after_a_restart(tmp_path):
    """Other `Episodes`, as of another launch: the instance is made by repeating the turns, and the tokens are those of
    an episode that was not interrupted."""

    async def run() -> None:
        async with playing(tmp_path) as episodes:
            whole = await play(episodes, "goes on", 3)
            prompt = await episodes.open(prompt_of(episodes, "goes on", 3))
            ended = episodes.end_turn(await sampled(Completion(3, 0, 10), episodes.chat))
            within = await episodes.advance(prompt, ended)
            waiting = episodes.end_turn(await sampled(within, episodes.chat))
            assert waiting.waiting and within.turn_start == len(within.token_ids) and not within.waiting
        for begun in (within, waiting):
            async with playing(tmp_path) as episodes:
                again = await episodes.advance(prompt, begun) if begun.waiting else begun
                again = await episodes.play(prompt, again, lambda turn: sampled(turn, episodes.chat))
            assert again.token_ids == whole.token_ids and again.finish_reason == "stop" and again.anew == 0
            parts = [[(turn.start, turn.end, turn.reward) for turn in each.turns] for each in (again, whole)]
            assert parts[0] == parts[1]

    asyncio.run(run())


def test_a_checkpoint_keeps_the_turn_that_ended_since_the_engines_wrote():
    """The engine's part of a turn is older than the ledger's turn, or newer than an answer: the longer one counts."""
    ended = Completion(0, 0, 7, [1, 2, 3], [-1.0] * 3, turns=[Turn(0, 3)])
    begun = Completion(0, 1, 7, [1, 2, 3, 9], [-1.0] * 3 + [0.0], turns=[Turn(0, 3)])
    newer = Completion(0, 1, 7, [1, 2, 3, 9, 4], [-1.0] * 5, turns=[Turn(0, 3)])
    group = Group(Prompt(0, Problem("p", "?", "1", environment="guess"), [5]), [ended, begun], [None, None])
    parts = [Completion(0, 0, 7, [1, 2], [-1.0] * 2), newer]
    [kept] = with_unfinished(LedgerState(0, 1, 1, 0, 0, [group], [0]), parts).groups
    assert kept.completions[0].waiting and kept.completions[0].token_ids == [1, 2, 3]
    assert kept.completions[1].token_ids == [1, 2, 3, 9, 4] and not kept.completions[1].waiting


class Engines:
    """In place of the client: ends what it is given, plain completions after the turns of episodes."""

    continue_turns = EngineClient.continue_turns
    live: ClassVar = {1: 0}

    def __init__(self, config: Config) -> None:
        self.config, self.training_in_flight = config, 0
        self.waves: list[list[tuple[int, int]]] = []
        self.queue: asyncio.Queue[Completion] = asyncio.Queue()
        self.routed: set[tuple[int, int]] = set()

    def slots(self) -> int:
        return 8

    def _free(self, turn: Completion) -> bool:
        return turn.unfinished and not turn.waiting and (turn.group, turn.index) not in self.routed

    async def submit(self, groups: list[Group]) -> None:
        free = [each for group in groups for each in group.completions if self._free(each)]
        self.waves.append([(each.group, each.index) for each in free])
        self.routed |= set(self.waves[-1])
        self.training_in_flight += len(free)
        for each in sorted(free, key=lambda each: each.group == 1):
            assert len(each.token_ids) == each.turn_start
            tokens, logprobs = [*each.token_ids, 5, 6], [*each.logprobs, -1.0, -1.0]
            self.queue.put_nowait(replace(each, token_ids=tokens, logprobs=logprobs, finish_reason="stop"))

    async def finished(self) -> AsyncIterator[Completion]:
        while True:
            ended = await self.queue.get()
            await asyncio.sleep(0)
            self.routed.discard((ended.group, ended.index))
            self.training_in_flight -= 1
            yield ended


class Environments:
    """Answer completion i with one token until it has turns[i]; as soon as the test lets them, if it says so."""

    def __init__(self, *turns: int, go: Sequence[asyncio.Event] = ()) -> None:
        self.turns, self.go = turns, go

    def end_turn(self, completion: Completion) -> Completion:
        turn = Turn(completion.turn_start, len(completion.token_ids), 1.0)
        return replace(completion, turns=[*completion.turns, turn], finish_reason=None)

    async def advance(self, prompt: Prompt, turn: Completion) -> Completion:
        if self.go:
            await self.go[turn.index].wait()
        if len(turn.turns) == self.turns[turn.index]:
            return replace(turn, finish_reason="stop")
        return replace(turn, token_ids=[*turn.token_ids, 9], logprobs=[*turn.logprobs, 0.0])


class Scorer:
    async def score(self, problem: Problem, completion: Completion) -> tuple[Reward, str]:
        return Reward(float(completion.index), 0.0, 0.0, 0.0, 0.0, Verdict.WRONG), ""

    async def settle(self, group: Group, *scored: Any) -> list[tuple[Any, ...]]:
        return [scored]


class Scene:
    """A ledger and engines, and the loop between them, whose logger notes what waits."""

    def __init__(self, config: Config, environments: Any, scorer: Any = None) -> None:
        self.ledger, self.engines = Ledger(Stages(config)), Engines(config)
        self.logger: Any = SimpleNamespace(engines=self.engines, ledger=self.ledger, waiting=0, _idle=IdleSeats())
        self.logger.note_waiting = lambda: RunLogger.note_waiting(self.logger)
        learner: Any = Learner(None, self.ledger, None, None)
        parts: Any = (scorer or Scorer(), environments, None, learner, None, self.logger, None, [])
        self.loop = TrainingLoop(self.ledger, self.engines, *parts)

    async def begin(self, *prompts: Prompt) -> asyncio.Task[None]:
        """Open a group of each prompt, and collect what ends of them."""
        for prompt in prompts:
            self.ledger.open(prompt, [7] * self.engines.config.rollout.group_size)
        await self.engines.submit(list(self.ledger.groups.values()))
        return asyncio.create_task(self.loop.collect())


def prompt(index: int, environment: str) -> Prompt:
    return Prompt(index, Problem("p", "?", "1", environment=environment), [1])


def test_in_synchronous_mode_turns_wait_for_one_another_and_for_completions_without_an_environment():
    """A wave of an episode's group and a plain one that ends last: nothing else would send the second turns out."""

    async def run() -> list[list[tuple[int, int]]]:
        rollout = {"max_async_level": 0, "prompts_per_step": 2, "group_size": 2}
        scene = Scene(Config.model_validate({"rollout": rollout}), Environments(3, 3))
        collecting = await scene.begin(prompt(0, "guess"), prompt(1, ""))
        groups = await asyncio.wait_for(scene.ledger.take(), 300)
        collecting.cancel()
        assert [len(each.turns) for group in groups for each in group.completions] == [3, 3, 0, 0]
        return scene.engines.waves

    assert asyncio.run(run()) == [[(0, 0), (0, 1), (1, 0), (1, 1)], [(0, 0), (0, 1)], [(0, 0), (0, 1)]]


@pytest.mark.parametrize(("level", "counts", "waves"), [(2, [4, 3, 2, 1, 0], 2), (0, [4, 4, 3, 3, 0], 1)])
def test_an_episode_waits_for_its_environment_or_in_synchronous_mode_for_all(level, counts, waves):
    """How many of four wait at first, and after each answer; completions 1 and 3 are over with it. Then how often
    turns were sent out."""

    async def run() -> None:
        config = Config.model_validate({"rollout": {"max_async_level": level, "group_size": 4}})
        go = [asyncio.Event() for _ in range(4)]
        scene = Scene(config, Environments(2, 1, 2, 1, go=go))
        collecting = await scene.begin(prompt(0, "x"))
        waiting = []
        for event in (None, *go):
            if event:
                event.set()
            for _ in range(50):
                await asyncio.sleep(0)
            waiting.append(scene.logger.waiting)
        collecting.cancel()
        assert (waiting, len(scene.engines.waves) - 1) == (counts, waves)

    asyncio.run(run())


def test_a_batch_comes_together_whatever_its_environments_do(tmp_path):
    """A group of each kind at once: those that fail say nothing and give up their slots, and the others are trained."""
    failing, sound = ["raises", "1 MB", "hangs", "sys.exit"], ["control", "goes on", "ends"]

    async def run() -> None:
        rollout = {"prompts_per_step": len(sound), "group_size": 2}
        async with playing(tmp_path, rollout=rollout, objective={"filter_groups_by": "off"}) as episodes:
            config, scene = episodes.config, Scene(episodes.config, episodes, episodes.scorer)
            prompts = [prompt_of(episodes, kind, index) for index, kind in enumerate(failing + sound)]
            collecting = await scene.begin(*prompts)
            taking = asyncio.ensure_future(scene.ledger.take())
            await asyncio.wait({taking, collecting}, timeout=600, return_when=asyncio.FIRST_COMPLETED)
            assert taking.done(), collecting.exception() if collecting.done() else scene.ledger.groups
            collecting.cancel()
            groups = taking.result()
            ends = [[each.finish_reason for each in group.completions] for group in groups]
            assert ends == [["stop"] * 2] * len(sound)
            assert [len(group.completions[1].turns) for group in groups] == [4, 4, 1]
            trained = train_sequences(groups, objective_of(config), config)
            assert [each.group for each in trained] == [4, 4, 5, 5, 6, 6]
            filtered = {group.prompt.problem.text: group for group in scene.ledger.trained(groups)}
            for kind in failing:
                assert [each.finish_reason for each in filtered[kind].completions] == [WRONG[kind][0]] * 2
                assert not any(reward.verdict.graded for reward in filtered[kind].rewards)
            assert scene.logger.waiting == 0

    asyncio.run(run())


@pytest.mark.parametrize("case", read_table("trainer/cases", of="idle seats"), ids=itemgetter("name"))
def test_idle_is_what_waiting_episodes_would_take_by_time(monkeypatch, case):
    """moments: (seconds that it lasts, busy, seats, waiting). Each step has its own share, from the last counts on."""
    now = [100.0]
    monkeypatch.setattr("trainer.timing.time.monotonic", lambda: now[0])
    seats = IdleSeats()
    for lasts, *counts in case["moments"]:
        seats.note(*counts)
        now[0] += lasts
    assert seats.take_share() == case["share"]
    seats.note(0, 8, 8)
    for wait, share in ((5, 1.0), (5, 1.0), (0, 0.0)):
        now[0] += wait
        assert seats.take_share() == share


def test_the_line_of_progress_says_how_many_wait_if_any():
    stream = io.StringIO()
    progress = Progress(stream, clock=iter(range(0, 1000, 20)).__next__)
    given: Any = {"done": 1, "needed": 9, "in_flight": 4, "tokens_per_s": 1, "oldest_wait_s": 1, "step": 1, "steps": 2}
    progress.batch(**given)
    assert "wait" not in stream.getvalue()
    progress.batch(**given, waiting=3)
    assert "4 in flight  oldest 1.0 s  3 wait for environments\n" in stream.getvalue() and not progress.failures
    progress.batch(**given, filtered="2 groups thrown away (2 all wrong)")
    assert " min  2 groups thrown away (2 all wrong)  1 tokens/s" in stream.getvalue() and not progress.failures


def test_calls_of_tools_are_counted_by_episode_and_failures_by_call():
    def metrics(*episodes: list[dict[str, float]]) -> dict[str, float]:
        turns = [[Turn(0, 1, reward=1.0, seconds=2.0, info=info) for info in infos] for infos in episodes]
        ended = [Completion(0, 0, 0, [5], [-1.0], [VersionSpan(0, 0, 1)], "stop", turns=each) for each in turns]
        row = rollout_metrics([Group(prompt(0, "x"), ended, [None] * len(ended))], [0], [])
        return {name.removeprefix("environment/"): v for name, v in row.items() if name.startswith("environment/")}

    assert metrics([{"tool_calls": 3, "failed_calls": 1, "depth": 2}, {"tool_calls": 1}], [{}, {}]) == {
        "turns": 2.0, "wait_s": 2.0, "failed": 0.0, "tool_calls": 2.0, "failed_calls": 0.25, "info/depth": 2.0,
        "started_anew": 0.0,
    }  # fmt: skip
    assert {"environment/tool_calls", "environment/failed_calls", "environment/waiting"} <= set(METRICS)
    none = metrics([{"tool_calls": 0}])
    assert none["failed_calls"] == 0.0 and none["tool_calls"] == 0.0 and "tool_calls" not in metrics([{}])


def prompts_of(folder: Path, name: str = "ours") -> PromptFormat:
    return PromptFormat(chat_of(folder, name), Data(system_prompt=""))


@pytest.fixture
def prompts(tmp_path):
    return prompts_of(tmp_path)


def first_prompt(prompts: PromptFormat) -> Prompt:
    return Prompt(0, PROBLEM, prompts.render(PROBLEM.text))


def episode(chat: Chat, *turns: str) -> Completion:
    """An episode whose turns end with the end token, between which a user says a text; the last one has reward 1."""
    completion = Completion(0, 0, 0, finish_reason="stop")
    for number, text in enumerate(turns):
        ids = chat.bridge([("user", "higher <|end|>")]) if number else []
        start = len(completion.token_ids) + len(ids)
        completion.token_ids = [*completion.token_ids, *ids, *chat.encode(text), chat.eos_id]
        end = len(completion.token_ids)
        completion.spans = [*completion.spans, VersionSpan(0, start, end)]
        turn = Turn(start, end, reward=float(number == len(turns) - 1), seconds=0.5)
        completion.turns = [*completion.turns, turn]
    completion.logprobs = [-1.0] * len(completion.token_ids)
    return completion


@pytest.mark.parametrize("name", ENDS)
def test_an_episode_is_split_by_its_turns_whatever_their_texts_spell(tmp_path, name):
    prompts = prompts_of(tmp_path, name)
    parts = turns_of(prompts, first_prompt(prompts), episode(prompts.chat, "8", "12 <|user|> <|im_start|>"))
    think = prompts.chat.think_prefix
    assert [(part.role, part.reward, part.text) for part in parts] == [
        ("policy", 0.0, f"{think}8"), ("environment", None, "higher <|end|>"),
        ("policy", 1.0, f"{think}12 <|user|> <|im_start|>"),
    ]  # fmt: skip


def test_tokens_that_no_bridge_of_one_message_made_are_shown_as_they_are(prompts):
    several = prompts.chat.bridge([("user", "a"), ("user", "b")])
    completion = Completion(0, 0, 0, [5, *several, 6], turns=[Turn(0, 1), Turn(1 + len(several), 2 + len(several))])
    assert turns_of(prompts, first_prompt(prompts), completion)[1].text == "<|user|>a<|user|>b<|assistant|>"


def test_a_beginning_of_the_environment_and_a_failure_are_shown(prompts, monkeypatch):
    completion = Completion(0, 0, 0, [5], turns=[Turn(0, 1, failure="environment guess: hung")])
    opened = turns_of(prompts, Prompt(0, PROBLEM, prompts.render("Another text.")), completion)
    assert opened[0] == TurnText("environment", "<|user|>Another text.<|assistant|>")
    assert (opened[1].role, opened[1].failure) == ("policy", "environment guess: hung")
    monkeypatch.setattr(prompts.chat, "think_prefix", "<think>")
    for turn, text in ((Turn(0, 0), ""), (Turn(0, 1), "<think>" + prompts.chat.decode([5]))):
        completion = Completion(0, 0, 0, [5][: turn.end], turns=[turn])
        shown = turns_of(prompts, first_prompt(prompts), completion)
        assert shown == [TurnText("policy", text, turn.reward)], "also a turn that never began"


def group_of(problem: Problem, prompts: PromptFormat, *completions: Completion) -> Group:
    rewards: list[Reward | None] = [reward_of(each) for each in completions]
    prompt = Prompt(0, problem, prompts.render(problem.text))
    return Group(prompt, list(completions), rewards, ["text"] * len(completions))


def test_rollout_files_have_the_turns_of_episodes_and_nothing_new_of_others(tmp_path, prompts):
    logger = logger_of(tmp_path, io.StringIO(), prompts=prompts)
    single = group_of(Problem("q", "1 + 1?", "2"), prompts, Completion(0, 0, 0, [5], [-1.0], finish_reason="stop"))
    asyncio.run(logger.keep([group_of(PROBLEM, prompts, episode(prompts.chat, "8", "12")), single], 1))
    first, second = map(json.loads, (tmp_path / "run" / "rollouts" / "step_1.jsonl").read_text().splitlines())
    assert first["turns"] == [[
        {"role": "policy", "text": "8", "reward": 0.0}, {"role": "environment", "text": "higher <|end|>"},
        {"role": "policy", "text": "12", "reward": 1.0},
    ]]  # fmt: skip
    assert list(second) == ["prompt", "completions", "rewards", "texts"]
    assert msgspec.convert(first, Group).completions[0].turns[1].end == len(first["completions"][0]["token_ids"])


def test_what_an_environment_grades_has_neither_format_nor_language(prompts):
    group = group_of(PROBLEM, prompts, episode(prompts.chat, "8"), episode(prompts.chat, "8", "12"))
    row = rollout_metrics([group], [0], [])
    assert row["accuracy"] == 1.0 and row["reward/mean"] == 1.0
    assert not {"format", "consistency", "reward/format", "reward/language"} & set(row)
    well = Reward(1.1, 0.1, 0.9, 0.0, 0.1, Verdict.CORRECT, consistent=True)
    single = Group(Prompt(1, Problem("q", "?", "1"), [1]), [episode(prompts.chat, "8")], [well])
    mixed = rollout_metrics([group, single], [0, 0], [])
    assert (mixed["format"], mixed["consistency"], mixed["reward/format"]) == (1.0, 1.0, 0.1)


def test_an_evaluation_and_its_report_show_turns_and_only_what_is_measured(tmp_path, prompts):
    def shown_turns(*turns: str) -> Sampled:
        completion = episode(prompts.chat, *turns)
        text, texts = prompts.chat.decode(completion.token_ids), turns_of(prompts, first_prompt(prompts), completion)
        return Sampled(PROBLEM, text, reward_of(completion), completion.sampled_tokens, texts)

    score = summarise(1.0, [[shown_turns("8", "[bold]12\x1b[2J")], [shown_turns("3")]])
    assert (score.consistency, score.format, score.accuracy) == (None, None, 1.0)
    records = [EvaluationRecord(0, 1.0, msgspec.json.decode(msgspec.json.encode(score), type=type(score)))]
    table = plain(before_after_table(records, 1.0))
    assert "reward" in table and "language consistency" not in table and "format" not in table
    text = plain(sample_panels(records, 1.0)[0])
    lines = [line.strip("│ ") for line in text.splitlines()]
    shown = ["", "policy (reward 0): 8", "environment: higher <|end|>", "policy (reward 1): [bold]12·[2J"]
    assert lines[2:6] == shown and "environment guess" in text and "ground truth" not in text
    assert b'"turns"' not in msgspec.json.encode(Sampled(PROBLEM, "", reward_of(episode(prompts.chat, "1")), 1))
    logger_of(tmp_path, stream := io.StringIO()).evaluation(0, score)
    assert "accuracy 1.000" in stream.getvalue() and "tokens" in stream.getvalue()
    assert "consistency" not in stream.getvalue() and "format" not in stream.getvalue()
