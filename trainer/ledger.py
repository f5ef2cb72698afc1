"""All that is known about work: which groups are open, ready, trained or filtered, and who may start the next one.

    open --completions and rewards--> ready --take--> trained --release (engines hold the new weights)--> slot is free
                                 \\--> filtered (no signal): slot is free at once

Bounded staleness without dropping: a group needs one of (L + 1) * P slots to start, and no more than W - 1
groups that started later may be trained before it. Both together bound the age of a trained token:

    age <= L + ceil((W - 1) / P)       (L async level; P prompts per step, W window, both in groups)

Slots alone bound only the age at birth: a long group could be overtaken again and again. The window alone does not
bound admission. In synchronous mode (async level 0) a whole batch starts together on the newest weights: age is 0.

A window lets short completions go first; all others follow, so that over a run the lengths trained are the lengths
sampled. While it fills, though, batches would be too short, and while it empties too long: so it opens by one group
after every OPENING_GROUPS that were trained, and closes likewise towards the end of a stage.

With rollout.fixed_staleness (for experiments on old data) a batch is trained only when all slots hold ready groups, or
all groups that the stage still trains are ready. Then nothing is sampled while a batch is trained, no token comes from
weights that arrived in flight, and the oldest groups go first whatever the window:

    age of every token = min(L, batches trained before it in its stage)

because batch k starts when the weights of version k - L are there, and is complete before the next version is trained.

Every group belongs to one stage (stages.py): towards the end of a stage no more are started than it will train, and
the next begins with an empty ledger.
Pure but for one asyncio event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from copy import copy, deepcopy

import msgspec

from shared.errors import NoProgress, RunError
from shared.sections import Rollout
from shared.types import Completion, Group, Prompt, Reward
from trainer.objectives.advantage import diverse, turns_differ
from trainer.objectives.registry import objective_of
from trainer.stages import Stages, StageState


class Interrupted(Exception):
    """The user asked to stop; nothing was lost."""


class LedgerState(msgspec.Struct):
    """The ledger on disk (ledger_file.py), everything needed to go on as if nothing had happened."""

    version: int
    """policy version = batches trained"""
    next_index: int
    """index of the next prompt to draw: the data cursor"""
    started: int
    """groups that were given a slot, ever"""
    filtered: int
    """groups without signal, ever"""
    filtered_in_a_row: int
    groups: list[Group]
    """open and ready groups, in order of admission, partial completions included"""
    overtaken: list[int]
    """[groups] how many later groups were trained before each"""
    trained: int = 0
    """groups trained, ever"""
    stage: StageState = msgspec.field(default_factory=StageState)
    teacher: str = ""
    """`Objective.served_teacher`, whose log-probs the completions hold"""
    filtered_since_step: list[Group] = []
    """groups without signal that no step has reported yet"""


def with_unfinished(state: LedgerState, partial: Iterable[Completion]) -> LedgerState:
    """The state with what engines had of its unfinished completions (partial), whose groups it changes."""
    known = {(c.group, c.index): c for c in partial}
    for group in state.groups:
        newest = [known.get((c.group, c.index), c) if c.finish_reason is None else c for c in group.completions]
        group.completions = [  # an environment may have answered since
            one if len(one.token_ids) >= len(c.token_ids) else c
            for one, c in zip(newest, group.completions, strict=True)
        ]
    return state


def _copy(group: Group) -> Group:
    """The group as it is now: its completions get log-probs of a teacher, rewards and texts later."""
    return Group(group.prompt, [copy(each) for each in group.completions], list(group.rewards), list(group.texts))


class Ledger:
    """Slots, groups and their states. All waiting is inside `slot` and `take`; every change wakes the waiters."""

    PATIENCE_STEPS = 20
    """so many batches of groups without signal in a row, and the run stops"""
    OPENING_GROUPS = 8
    """trained groups that open, or close, the window by one"""

    def __init__(self, stages: Stages):
        self.stages, self.teacher = stages, objective_of(stages.config).served_teacher
        self.version = 0
        self.trained_groups = 0
        self.next_index = 0
        self.started = 0
        self.filtered = 0
        self.filtered_in_a_row = 0
        self.busy_slots = 0
        self.groups: dict[int, Group] = {}
        self._ready: set[int] = set()  # those that are complete and have signal
        self._taken_after: dict[int, int] = {}  # waiting group -> later groups taken before it
        self._held: dict[int, int] = {}  # version -> slots that its release frees
        self.interrupted = False
        self._changed = asyncio.Event()
        self._ids: dict[int, int] = {}
        """every token id that came, so that completions share one object of each: 28 bytes a token"""
        self.filtered_since_step: list[Group] = []

    @property
    def settings(self) -> Rollout:
        """The settings in force."""
        return self.stages.now.rollout

    @property
    def stage(self) -> StageState:
        """Where in its stages the run is."""
        return self.stages.state

    @property
    def slots(self) -> int:
        """Groups that may be open or not yet in all engines' weights."""
        return (self.settings.max_async_level + 1) * self.settings.prompts_per_step

    # ---- admission -------------------------------------------------------------------------------------------

    def wanted(self) -> int:
        """Groups that may start now."""
        left = self.stage.target - (self.started - self.filtered)
        free = min(self.slots - self.busy_slots, left)
        if self.settings.max_async_level == 0 and len(self._ready) < len(self.groups):
            return 0  # synchronous: the next wave starts when the last one is complete, so batches repeat exactly
        return max(free, 0)

    @property
    def exhausted(self) -> bool:
        """All groups that this run will train have been trained."""
        return self.version >= self.stages.config.steps

    @property
    def stage_over(self) -> bool:
        """All groups of this stage have been trained, and the run goes on."""
        return self.trained_groups >= self.stage.target and not self.exhausted

    def end_stage(self, reason: str) -> None:
        """Let this stage end as soon as the groups that are open fill whole batches; only so many more are started."""
        size = self.settings.prompts_per_step
        batches = -(-len(self.groups) // size)
        self.stage.target = min(self.stage.target, self.trained_groups + batches * size)
        self.stage.ended_by = reason
        self._changed.set()

    def next_stage(self) -> str:
        """Go on with the next stage, once this one is over and its groups are trained; returns one line about it."""
        change = self.stages.next(self.version, self.next_index, self.trained_groups)
        self._changed.set()
        return change

    async def slot(self) -> int:
        """Wait until groups may start; returns how many, 0 when the run needs no more."""
        await self._until(lambda: self.wanted() > 0 or self.exhausted or self.interrupted)
        return 0 if self.exhausted or self.interrupted else self.wanted()

    def open(self, prompt: Prompt, seeds: list[int]) -> Group:
        """Start a group: takes a slot. `seeds` [group_size] are the completions' sampling seeds."""
        if self.busy_slots >= self.slots:
            raise RunError("a group was started without a slot")
        completions = [Completion(group=prompt.index, index=i, seed=seed) for i, seed in enumerate(seeds)]
        group = Group(prompt, completions, rewards=[None] * len(completions), texts=[""] * len(completions))
        self.groups[prompt.index] = group
        self._taken_after[prompt.index] = 0
        self.busy_slots += 1
        self.started += 1
        self.next_index = prompt.index + 1
        return group

    # ---- completion ------------------------------------------------------------------------------------------

    def receive(self, completion: Completion) -> None:
        """A completion or a turn of its episode has ended (not yet scored). Raises RunError if it is not awaited."""
        group = self.groups.get(completion.group)
        if group is None or group.completions[completion.index].finish_reason is not None:
            raise RunError(f"completion {completion.index} of group {completion.group} arrived twice or unasked")
        completion.token_ids = list(map(self._ids.setdefault, completion.token_ids, completion.token_ids))
        group.completions[completion.index] = completion

    def advance(self, completion: Completion) -> None:
        """The environment answered the turn that ended: keep what the completion is now."""
        self.groups[completion.group].completions[completion.index] = completion

    def close(self, completion: Completion, reward: Reward, text: str) -> None:
        """A completion was scored; the last of a group makes it ready, or filtered when it has no signal."""
        group = self.groups[completion.group]
        if group.rewards[completion.index] is not None:
            raise RunError(f"completion {completion.index} of group {completion.group} was scored twice")
        group.rewards[completion.index] = reward
        group.texts[completion.index] = text
        if group.complete:
            if self._has_signal(group):
                self._ready.add(completion.group)
                self.filtered_in_a_row = 0
            else:
                self._filter(group)
            self._changed.set()

    def _has_signal(self, group: Group) -> bool:
        if any(completion.finish_reason == "abort" for completion in group.completions):
            return False  # one that the policy did not end says nothing, and the others are no whole group
        now = self.stages.now
        by, environment = objective_of(now).filter_groups_by, now.environment
        if by == "total" and environment.credit == "turn":
            return turns_differ(group, environment.discount)
        return diverse(group.rewards, by)

    def _filter(self, group: Group) -> None:
        del self.groups[group.prompt.index], self._taken_after[group.prompt.index]
        self.filtered_since_step.append(group)
        self.filtered += 1
        self.filtered_in_a_row += 1
        self.busy_slots -= 1
        if self.filtered_in_a_row >= self.PATIENCE_STEPS * self.settings.prompts_per_step:
            verdicts: dict[str, int] = {}
            for reward in (r for g in self.filtered_since_step for r in g.rewards if r is not None):
                verdicts[reward.verdict.value] = verdicts.get(reward.verdict.value, 0) + 1
            raise NoProgress(
                f"no trainable group in {self.filtered_in_a_row} attempts; verdicts: {verdicts}. All completions of "
                "every group got the same reward: use easier or harder problems (data.train), a longer "
                "rollout.max_completion_tokens, a larger rollout.group_size, or SFT"
            )

    # ---- training --------------------------------------------------------------------------------------------

    def _next(self) -> Group | None:
        """The oldest ready group inside the window anchored at the oldest waiting one."""
        since = (self.trained_groups - self.stage.first_trained) // self.OPENING_GROUPS
        left = (self.stage.target - self.trained_groups) // self.OPENING_GROUPS
        window = min(self.stages.now.window, 1 + since, 1 + left)
        overtaken = next(iter(self._taken_after.values()), 0)
        for position, (index, group) in enumerate(self.groups.items()):
            if position > 0 and position + overtaken >= window:
                return None
            if index in self._ready:
                return group
        return None

    def _take_one(self, group: Group) -> Group:
        index = group.prompt.index
        del self.groups[index], self._taken_after[index]
        self._ready.remove(index)
        for waiting in self._taken_after:  # in order of admission: later ones do not overtake
            if waiting > index:
                break
            self._taken_after[waiting] += 1
        return group

    def _held_back(self) -> bool:
        """Whether a batch must wait for younger groups: not as many are ready as there are slots, or as are left to
        train in this stage. Groups without signal do not count, others take their slots."""
        left = self.stage.target - self.trained_groups
        return self.settings.fixed_staleness and self.ready() < min(self.slots, left)

    async def take(self) -> list[Group]:
        """Wait for one batch: [prompts_per_step] complete groups with signal, in order of admission; with
        `fixed_staleness` also for those after it. Their slots stay busy until `release`. After `interrupt` it gives
        back what it holds and raises Interrupted."""
        batch: list[Group] = []
        await self._until(lambda: not self._held_back() or self.interrupted)
        try:
            while len(batch) < self.settings.prompts_per_step:
                await self._until(lambda: self._next() is not None or self.interrupted)
                group = self._next()
                if group is None or self.interrupted:
                    raise Interrupted
                batch.append(self._take_one(group))
        except BaseException:
            self._put_back(batch)
            raise
        return sorted(batch, key=lambda group: group.prompt.index)

    def _put_back(self, batch: list[Group]) -> None:
        for group in batch:
            self.groups[group.prompt.index], self._taken_after[group.prompt.index] = group, self.stages.now.window
            self._ready.add(group.prompt.index)
        self.groups = dict(sorted(self.groups.items()))
        self._taken_after = dict(sorted(self._taken_after.items()))

    def interrupt(self) -> None:
        """Start and take no more groups."""
        self.interrupted = True
        self._changed.set()

    def trained(self, groups: list[Group]) -> list[Group]:
        """A batch of these groups was trained. Returns the groups that were filtered since the previous batch."""
        self.version += 1
        self.trained_groups += len(groups)
        self._held[self.version] = len(groups)
        filtered, self.filtered_since_step = self.filtered_since_step, []
        self._changed.set()
        return filtered

    def release(self, version: int) -> None:
        """All engines hold `version`: the slots of the groups it was trained on are free."""
        for trained in [held for held in self._held if held <= version]:
            self.busy_slots -= self._held.pop(trained)
        self._changed.set()

    def staleness(self, group: Group) -> int:
        """Age in versions of the oldest token of a group, if it is trained now."""
        return self.version - min(completion.oldest_version for completion in group.completions)

    # ---- summary and disk ------------------------------------------------------------------------------------

    def ready(self) -> int:
        """Groups that are complete and have signal."""
        return len(self._ready)

    def unfinished(self) -> list[Completion]:
        """Completions without an end, in order of admission."""
        return [c for group in self.groups.values() for c in group.completions if c.finish_reason is None]

    def unscored(self) -> list[Completion]:
        """Completions that ended but have no reward (a restart came between)."""
        return [
            completion
            for group in self.groups.values()
            for completion, reward in zip(group.completions, group.rewards, strict=True)
            if completion.finish_reason is not None and reward is None
        ]

    def waiting(self) -> list[Completion]:
        """Completions that wait for their environment."""
        return [c for group in self.groups.values() for c in group.completions if c.waiting]

    def state(self) -> LedgerState:
        """Everything at this moment; what happens afterwards does not change it, so that it can be written meanwhile.

        What engines have of unfinished completions is not in it: `with_unfinished` adds that.
        """
        return LedgerState(
            self.version, self.next_index, self.started, self.filtered, self.filtered_in_a_row,
            [_copy(group) for group in self.groups.values()], list(self._taken_after.values()), self.trained_groups,
            deepcopy(self.stage), self.teacher, [_copy(group) for group in self.filtered_since_step],
        )  # fmt: skip

    def restore(self, state: LedgerState) -> None:
        """Go on from a saved state. The engines hold `state.version` soon, so only open groups keep their slots. With
        another teacher than then, what has ended is scored again, and the new one asked."""
        self.version, self.next_index = state.version, state.next_index
        self.started, self.filtered = state.started, state.filtered
        self.filtered_in_a_row = state.filtered_in_a_row
        self.trained_groups = state.trained
        self.stages.enter(state.stage)
        self.groups = {group.prompt.index: group for group in state.groups}
        self._taken_after = dict(zip(self.groups, state.overtaken, strict=True))
        self.filtered_since_step = list(state.filtered_since_step)
        self._held.clear()
        self.busy_slots = len(self.groups)
        if state.teacher != self.teacher:
            for group in state.groups:
                group.rewards = [None] * len(group.completions)
                for completion in group.completions:
                    completion.teacher = []
        for group in [one for one in self.groups.values() if one.complete and not self._has_signal(one)]:
            self._filter(group)  # by a filter that the settings did not have before
        self._ready = {index for index, group in self.groups.items() if group.complete}

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()
