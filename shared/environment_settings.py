"""The section [environment] of a settings file: which environments problems have, and the limits of an episode."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from shared.section import Section


class EnvironmentSettings(Section):
    name: str = ""
    """environment of the problems whose row names none; "" for none: one completion, graded by the verifier"""
    plugins: list[str] = []
    """Python files that define more environments; each runs in processes of its own"""
    options: dict[str, dict[str, Any]] = {}
    """options of environments by name, e.g. { guess = { numbers = 32 } }; each checks its own, docs/environments.md
    lists them"""
    max_turns: int = Field(8, ge=1)
    """turns of the policy in an episode"""
    turn_tokens: int | None = Field(None, ge=1)
    """a turn that is cut at this length ends its episode. Not given: rollout.max_completion_tokens, which limits what
    is sampled in a whole episode"""
    observation_tokens: int = Field(512, ge=1)
    """longest text of an environment between two turns; longer ones are cut"""
    step_s: float = Field(30.0, gt=0)
    """an environment that takes longer for one answer has failed: its episode is not graded"""
    episode_s: float = Field(600.0, gt=0)
    """one that takes longer for all answers of an episode has failed too"""
    processes: int = Field(1, ge=1)
    """processes in which the environments of `plugins` run"""
    history: Literal["template", "whole"] = "template"
    """"template" refuses a model whose chat template changes earlier turns when another follows (as one that drops
    reasoning does), since a server would then show the model what it was not trained on; "whole" trains on the whole
    history as it was sampled, and a server must keep it too"""
    credit: Literal["episode", "turn"] = "episode"
    """"episode": all turns have the advantage of the episode; "turn": each has that of the rewards from it on, compared
    with the group's at the same turn"""
    discount: float = Field(1.0, ge=0, le=1)
    """with credit = "turn", a reward of k turns later counts discount^k: 1 counts all alike, with 0 a turn has its own
    reward only"""
