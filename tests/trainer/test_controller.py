"""What a batch asks of the trainers, in which order, by the objective; what is on disk when Ctrl-C ends the loop; where
a launch finds what an objective compares with (reference, soft values), at the start and after a resume."""

import asyncio
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.config import Config
from shared.errors import ConfigError, DataError
from shared.launch.calls import RequestDecoder, encode, request
from shared.progress import Progress
from shared.record_file import Written
from shared.types import Completion, Group, Problem, Prompt
from tests.trainer.test_checkpointer import Disk
from tests.trainer.test_data import LetterChat
from trainer.checkpoint import writer
from trainer.checkpoint.origin import Origin
from trainer.controller import TrainingLoop, evaluated_meanwhile
from trainer.data.data_source import DataSource, PromptFormat
from trainer.launch import Launch
from trainer.learner import Learner
from trainer.ledger import Interrupted, Ledger
from trainer.objectives.registry import objective_of, read_objective
from trainer.soft_values import FILE, SoftValues, settings_of
from trainer.stages import Stages
from trainer.step.batching import BatchPlan, Learned
from trainer.step.forward_backward import StepSums
from trainer.step.rank import Stepped, TrainerRank
from trainer.timing import PhaseTimer

KL = {"weight": 0.1}
AVERAGE = {**KL, "reference": {"kind": "average"}}


def group(index: int) -> Group:
    return Group(Prompt(index, Problem(str(index), "?", "1"), [1]), [Completion(index, 0, 0)], [None])


GROUPS = [group(index) for index in range(4)]
COUNTED = ("tokens", "compared", "clipped_low", "clipped_high", "masked", "abs_logprob_difference")


class Recorder:
    """Trainers that note what they are asked for, and write what `export` asks for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def compute_old_logprobs(self, plan: list[Any]) -> None:
        self.calls.append(f"old log-probs {plan[0][0]}")

    async def forward_backward(self, plan: list[Any]) -> StepSums:
        self.calls.append(f"train {plan[0][0]}")
        return StepSums(dict.fromkeys(COUNTED, 1.0) | {"loss": 1.0}, {}, 0.1, 10)

    async def step(self, rate: float) -> Stepped:
        self.calls.append("step")
        return Stepped(1.0, 0.1)

    async def call(self, method: Callable[..., Any], given: Any) -> None:
        if method is TrainerRank.export:
            make(Path(given))
        names = {TrainerRank.move_reference: "move", TrainerRank.set_objective: "objective"}
        self.calls.append(f"{names.get(method, 'export')} {given}")


def learner_of(version: int, minibatches: int, **objective: Any) -> Any:
    """A learner whose trainers note what they are asked on top of `version`, and whose plans are indices of groups."""
    given = {"rollout": {"prompts_per_step": 4}, "optimiser": {"minibatches": minibatches}, "objective": objective}
    stages = Stages(Config.model_validate(given))
    ledger: Any = SimpleNamespace(version=version, stages=stages, staleness=lambda group: 0)
    learner: Any = Learner(Recorder(), ledger, SimpleNamespace(vocabulary=100), PhaseTimer())

    def plan(minibatch: list[Group]) -> BatchPlan:
        indices = "".join(str(group.prompt.index) for group in minibatch)
        return BatchPlan([[indices]], 10, 10, 0.0, 0.0)

    learner.plan = plan
    return learner


def learned(version: int, minibatches: int, offline: Sequence[int] = (), **objective: Any) -> list[str]:
    """The calls of one batch of four groups and those `offline`."""

    async def go() -> Any:
        learner = learner_of(version, minibatches, **objective)
        output = await learner.learn(GROUPS, learner.clock.nothing(), [group(index) for index in offline])
        assert output.sums.sums["loss"] == 1.0 and output.plan.tokens == 10 * minibatches
        return learner.trainers.calls

    return asyncio.run(go())


def test_the_first_step_waits_until_the_update_before_has_read_the_weights():
    async def go() -> list[str]:
        learner, sync = learner_of(0, 1), asyncio.get_running_loop().create_future()
        learning = asyncio.ensure_future(learner.learn(GROUPS, sync))
        for _ in range(100):
            await asyncio.sleep(0)
        before = [*learner.trainers.calls]
        sync.set_result(None)
        await learning
        return before

    assert asyncio.run(go()) == ["train 0123"]


def test_trainers_get_an_objective_that_a_stage_or_a_step_changed_and_no_other():
    """As after a resume in the second stage: its objective, then a clip_high that the entropy's target moved, once.
    Over the wire a rank goes on with the very message that the controller sends."""
    stages = [{"name": "a", "until_step": 1}, {"name": "b", "objective": {"entropy_target": {"nats": 0.5}}}]
    trainers, state = Recorder(), Stages(Config.model_validate({"stages": stages, "objective": {"clip_low": 0.1}}))
    learner = Learner(trainers, SimpleNamespace(stages=state), None, PhaseTimer())

    def calls() -> list[str]:
        asyncio.run(learner.send_objective())
        return trainers.calls

    assert calls() == []
    state.next(1, 32, 32)
    assert calls() == calls() == ["objective {'clip_low': 0.1, 'entropy_target': {'nats': 0.5}}"]
    state.move(objective_of(state.now).after_step(0.25))
    assert calls() == calls() and trainers.calls[1:] == [
        "objective {'clip_low': 0.1, 'entropy_target': {'nats': 0.5}, 'clip_high': 0.28500000000000003}"
    ]
    rank = TrainerRank(Config(), SimpleNamespace(rank_in_role=0))
    table = {"entropy_target": {"nats": 0.5, "clip_high_bounds": [0.1, 0.3]}, "clip_high": 0.25}
    RequestDecoder(TrainerRank)(encode(request(TrainerRank.set_objective, table).message)).run(rank)
    assert rank.objective == read_objective(table) and rank.objective.in_force["clip_high"] == 0.25


def test_offline_groups_are_dealt_to_the_minibatches_and_the_policy_of_the_start_is_asked_before_several():
    two_steps = ["train 01", "step", "train 23", "step"]
    assert learned(0, 2) == two_steps
    assert learned(0, 2, offline=[8, 9]) == ["train 018", "step", "train 239", "step"]
    assert learned(0, 1, offline=[8, 9]) == ["train 012389", "step"]
    assert learned(0, 2, name="decoupled_ppo") == ["old log-probs 01", "old log-probs 23", *two_steps]
    assert learned(0, 1, name="decoupled_ppo") == ["train 0123", "step"], "it is the policy now"


@pytest.mark.parametrize(("reference", "moves"), [
    ({"kind": "average", "every": 2, "share": 0.25}, {2: "move 0.25", 4: "move 0.25"}),
    ({"kind": "average", "share": 0.5}, dict.fromkeys(range(1, 5), "move 0.5")),
    ({"kind": "previous", "every": 3}, {3: "move 1.0"}), ({"kind": "start"}, {}),
])  # fmt: skip
def test_a_reference_moves_after_every_so_many_batches(reference, moves):
    """Batches 1 to 4 of a run, also of one that was resumed between."""
    for batch in range(1, 5):
        calls = learned(batch - 1, 1, kl={"weight": 0.1, "reference": reference})
        assert calls == ["train 0123", "step", *([moves[batch]] if batch in moves else [])]


class Interruptible(Ledger):
    """One batch is there; Ctrl-C comes while it is trained."""

    async def take(self) -> list[Group]:
        if self.interrupted:
            raise Interrupted
        return GROUPS

    def staleness(self, group: Group) -> int:
        return 0

    def trained(self, groups: list[Group]) -> list[Group]:
        self.interrupt()
        return super().trained(groups)


class Shelf(Disk):
    """Engines and trainers that have little to save, not the first three times, and a record of the rollouts."""

    def __init__(self, run_dir: Path) -> None:
        self.rollouts, self.asked = run_dir / "rollouts" / "step_1.jsonl", 0

    async def snapshot(self, folder: Path) -> dict[str, Written]:
        """What a checkpoint begins with."""
        assert self.rollouts.exists(), "a checkpoint before the rollouts of its step"
        return {}

    async def saved(self) -> dict[str, Written] | None:
        self.asked += 1
        return None if self.asked < 4 else {}

    async def keep(self, groups: list[Group], version: int) -> None:
        """Slowly, as thousands of long completions are."""
        for _ in range(1000):
            await asyncio.sleep(0)
        self.rollouts.parent.mkdir(parents=True)
        self.rollouts.touch()


@pytest.mark.parametrize("every", [1, 10], ids=["checkpoint after the step", "checkpoint because of Ctrl-C"])
def test_a_checkpoint_comes_after_the_rollouts_of_its_step_also_when_ctrl_c_ends_the_loop(tmp_path, monkeypatch, every):
    """A resume does not train them again, so that they would stay missing."""
    monkeypatch.setattr(writer, "LOOK_S", 0.01)
    config = Config.model_validate(
        {"runs_dir": str(tmp_path), "steps": 5, "checkpoint": {"every": every},
         "rollout": {"prompts_per_step": 4, "max_async_level": 1}, "evaluate": {"every": 0}}
    )  # fmt: skip
    ledger, clock, shelf = Interruptible(Stages(config)), PhaseTimer(), Shelf(config.run_dir)

    async def nothing(*_: Any) -> None: ...

    async def learn(*_: Any) -> Learned:
        sums = StepSums(dict.fromkeys(COUNTED, 0.0), {}, 0.1, 10)
        return Learned(BatchPlan([[]], 0, 0, 0.0, 0.0), sums, Stepped(1.0, 0.1))

    parts: Any = (shelf, shelf, clock, Progress(io.StringIO()), Origin({}, {}))
    run: Any = SimpleNamespace(
        config=config, ledger=ledger, clock=clock, publish=nothing,
        checkpointer=writer.Checkpointer(config, ledger, *parts),
        learner=SimpleNamespace(learn=learn, offline_groups=list),
        logger=SimpleNamespace(step=lambda *_: {"entropy": 1.0}, keep=shelf.keep),
    )  # fmt: skip

    async def go() -> None:
        async with asyncio.TaskGroup() as run.loops:
            run.loops.create_task(TrainingLoop.train(run))

    with pytest.RaisesGroup(Interrupted):
        asyncio.run(go())
    assert writer.folder_of(config.run_dir, 1).is_dir() and shelf.rollouts.exists()


@pytest.mark.parametrize(
    ("every", "validation", "due"), [(2, "v.jsonl", [2, 4]), (0, "v.jsonl", []), (0, "", []), (5, "v.jsonl", [])]
)
def test_evaluations_are_under_way_only_where_some_are_due(every, validation, due):
    """Those before and after training are asked for by themselves; a resume is warned of others."""
    config = Config.model_validate({"steps": 5, "data": {"validation": validation}, "evaluate": {"every": every}})
    assert [version for version in range(7) if evaluated_meanwhile(config, version)] == due


def test_an_evaluation_begins_behind_the_update_of_its_version():
    async def go() -> None:
        versions, update = list[int](), asyncio.get_running_loop().create_future()

        async def evaluate(version: int) -> None:
            assert update.done()
            versions.append(version)

        run: Any = SimpleNamespace(evaluate_if_due=evaluate)
        waiting = asyncio.ensure_future(TrainingLoop.evaluate_after(run, update, 3))
        for _ in range(20):
            await asyncio.sleep(0)
        update.set_result(None)
        await waiting
        assert versions == [3]

    asyncio.run(go())


def make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    return folder


def reference(runs: Path, newest: Path | None, version: int, **objective: Any) -> tuple[Path, int]:
    """The folder, and how many models were exported for it."""
    config, trainers = Config.model_validate({"runs_dir": str(runs), "objective": objective}), Recorder()
    launch: Any = SimpleNamespace(config=config, trainers=trainers)
    return asyncio.run(Launch._reference_folder(launch, newest, version)), len(trainers.calls)


def test_the_policy_of_the_start_is_written_once_and_found_again(tmp_path):
    kept = tmp_path / "run" / "reference"
    with pytest.raises(ConfigError, match=r"began without objective\.kl"):
        reference(tmp_path, tmp_path / "step_3", 3, kl=KL)
    assert reference(tmp_path, tmp_path / "step_0", 0, kl=KL) == (kept, 1), "not yet begun"
    assert reference(tmp_path, tmp_path / "step_3", 3, kl=KL) == (kept, 0)
    assert reference(tmp_path, None, 0, kl=KL) == (kept, 1), "a run that starts anew starts with another policy"


def test_a_reference_that_moves_is_that_of_the_checkpoint_and_one_that_does_not_never_is(tmp_path):
    kept, moved = make(tmp_path / "run" / "reference"), make(tmp_path / "step_3" / "reference")
    assert reference(tmp_path, moved.parent, 3, kl=AVERAGE) == (moved, 0)
    assert reference(tmp_path, moved.parent, 3, kl={**KL, "reference": {"kind": "start"}}) == (kept, 0)
    assert reference(tmp_path, moved.parent, 3, name="dro", reference={"kind": "previous", "every": 2}) == (moved, 0)
    assert reference(tmp_path, tmp_path / "step_4", 4, kl=AVERAGE) == (kept, 0)


def test_soft_values_that_were_not_sampled_at_the_start_cannot_be_had_later(tmp_path):
    given = {"runs_dir": str(tmp_path), "steps": 1, "objective": {"name": "spo"}, "data": {"system_prompt": ""}}
    config = Config.model_validate(given)
    path = config.run_dir / FILE

    def values() -> dict[str, float]:
        """Those that a run with one problem goes on with at version 3."""
        prompts = PromptFormat(LetterChat(), config.data)
        source = DataSource([Problem("p", "?", "1")], Stages(config), prompts)
        learner = SimpleNamespace(offline=None, values={})
        run: Any = SimpleNamespace(ledger=SimpleNamespace(version=3), source=source, scorer=None, learner=learner)
        launch: Any = SimpleNamespace(config=config, engines=None, progress=Progress(io.StringIO()))
        asyncio.run(Launch._value_prompts(launch, run))
        return learner.values

    with pytest.raises(ConfigError, match=r'lacks the soft values of 1 problems, "p" .* start another one'):
        values()
    config.run_dir.mkdir(exist_ok=True)
    path.write_bytes(SoftValues(settings_of(config), {"p": 0.25}).content())
    assert values() == {"p": 0.25}
    path.write_bytes(path.read_bytes().replace(b"0.25", b"0.75"))
    with pytest.raises(DataError, match="changed after it was written"):
        values()
