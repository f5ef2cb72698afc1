"""The records that travel through a run: problem -> prompt -> completion -> reward -> group -> micro-batch.

All are msgspec structs: typed, cheap, encoded as msgpack on the wire and as JSON on disk (never pickle).
Shapes are given in brackets, units in names. What is not here: messages between ranks (`messages.py`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

import msgspec


class Problem(msgspec.Struct, frozen=True):
    """One task of a data file, e.g. Problem("gsm8k-1", "2+3=?", "5", language="en")."""

    id: str
    text: str
    answer: str
    """the ground truth that answers are compared with: an integer, a decimal or LaTeX; "" where there are `tests`"""
    language: str = "en"
    """language of `text`, a two-letter code"""
    domain: str = "math"
    """which verifier checks answers, e.g. "math", "code" (a program, run on `tests`) or "open" (none); see
    `verify/verifiers`"""
    source: str = ""
    tests: Any = None
    """the ground truth of domains such as "code", in a shape that their verifiers take"""
    environment: str = ""
    """name of the environment in which the policy acts, in several turns (`environments/`); "" for one completion"""
    pass_rate: float | None = None
    """share of an earlier model's completions that were right; None when it was not measured"""
    hidden: bool = False
    """nothing is compared with the ground truth: the domain has no verifier, or `data.open_share` keeps the answer from
    it"""
    checker: str = ""
    """verifier of this problem, where it is not its domain's: another domain, one of a plug-in file, or
    "reasoning_gym:KIND\""""
    answer_form: Literal["", "box", "code block", "response"] = ""
    """where a response gives its answer, "" for where its verifier looks; "response": all after the reasoning"""

    prefix: str = ""
    """beginning of a response, from which the policy goes on; it is judged as its own and not trained"""
    reasoning_language: str = ""
    """language in which its completions are to be reasoned and answered, and for which the prompt asks; "" for that of
    `text`, without a request"""
    columns: dict[str, Any] = {}
    """columns of its row, as they are there, for rewards that ask for them"""

    def __repr__(self) -> str:
        return f"Problem({self.id[-20:]!r}, {self.text[:50]!r}, answer={self.answer[:20]!r})"

    @property
    def verified(self) -> bool:
        """True if completions are right or wrong: only such problems count for accuracy, pass rates and votes."""
        return not self.hidden


class Prompt(msgspec.Struct, frozen=True):
    """A problem rendered with the chat format, ready to be sampled."""

    index: int
    """position of this draw in the whole run: unique, the same after a resume; seeds and group ids derive from it"""
    problem: Problem
    token_ids: list[int]
    """[prompt_tokens]"""

    def __repr__(self) -> str:
        return f"Prompt({self.index}, {self.problem!r}, {len(self.token_ids)} tokens)"


class VersionSpan(msgspec.Struct, frozen=True, gc=False):
    """Tokens `start` (inclusive) to `end` (exclusive) of a completion were sampled from policy `version`."""

    version: int
    start: int
    end: int


class Turn(msgspec.Struct, frozen=True, gc=False):
    """A turn of the policy that has ended: tokens `start` to `end` (exclusive) of its completion were sampled."""

    start: int
    end: int
    reward: float | None = None
    """reward from the environment; None where a verifier grades, or it has not answered"""
    solved: bool | None = None
    """whether the environment says that the task is solved; None where it says nothing"""
    seconds: float = 0.0
    """time that the environment took to answer"""
    info: dict[str, float] = {}
    """numbers that the environment gave, for the metrics"""
    failure: str = ""
    """why the environment did not answer, "" if it did"""


class TurnText(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the policy or its environment said in an episode, decoded: for people only, never trained on."""

    role: Literal["policy", "environment"]
    text: str
    reward: float | None = None
    """reward from the environment for a turn of the policy; None where a verifier grades"""
    failure: str = ""
    """why the environment did not answer the turn, "" if it did"""


class RouteFile(msgspec.Struct, frozen=True, weakref=True):
    """A file of `routes/` in the run's folder (route_files.py): the experts that an engine chose for tokens that follow
    each other, [tokens, layers, experts of a token] uint8, or uint16 where there are more than 256."""

    name: str
    """group/index.anew.first token, with the prompt's tokens counted"""
    tokens: int
    bytes: int
    sha256: str


class Completion(msgspec.Struct, gc=False):
    """One answer of the policy to a prompt, or one episode in an environment; partial while `finish_reason` is None.

    In an episode the tokens between two turns come from the environment: they are context, in no span and no turn.

    Example: a completion of 3 tokens, sampled while version 4 became version 5:
    Completion(group=7, index=0, seed=11, token_ids=[5, 9, 2], logprobs=[-.1, -2., -.3],
               spans=[VersionSpan(4, 0, 2), VersionSpan(5, 2, 3)], finish_reason="stop")
    """

    group: int
    """`Prompt.index` of its prompt"""
    index: int
    """0 .. group_size-1"""
    seed: int
    token_ids: list[int] = []
    """[tokens] exactly as sampled, the end-of-sequence token included; between turns what the environment said"""
    logprobs: list[float] = []
    """[tokens] log-probability under the sampling distribution (temperature applied), as the engine reported it; 0 for
    tokens that were not sampled"""
    spans: list[VersionSpan] = []
    """in order, covering the tokens that were sampled; none reaches over two turns"""
    finish_reason: str | None = None
    """"stop" (end of sequence, of the last turn), "length" (token limit), "abort" (it kills engines, and is given up),
    "crash" or "timeout" (of its environment), None while unfinished"""
    restarts: int = 0
    """how often an engine died under this completion"""
    teacher: list[float] = []
    """[tokens] log-probs under a teacher that is asked over HTTP, once it has ended"""
    turns: list[Turn] = []
    """turns of an episode that have ended; [] without an environment"""
    anew: int = 0
    """how often the episode began anew, because its environment did not repeat itself"""
    routes: list[RouteFile] = []
    """of a mixture whose routes are replayed: files with those of its prompt and tokens, in order, but for the last
    token, which the engine never read"""

    def __repr__(self) -> str:
        return f"Completion({self.group}, {self.index}, {len(self.token_ids)} tokens, {self.finish_reason})"

    @property
    def turn_start(self) -> int:
        """Where the turn under way begins, or would begin."""
        before = self.turns[-1].end if self.turns else 0
        return next((span.start for span in self.spans if span.start >= before), len(self.token_ids) if before else 0)

    @property
    def sampled(self) -> bytes:
        """[tokens] 1 for a token that was sampled, 0 for one of the environment."""
        mask, here = bytearray(b"\1") * len(self.token_ids), 0
        for start, end in (*((turn.start, turn.end) for turn in self.turns), (self.turn_start, len(self.token_ids))):
            mask[here:start] = bytes(max(start - here, 0))
            here = end
        return bytes(mask)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that were sampled."""
        return self.sampled.count(1) if self.turns else len(self.token_ids)

    @property
    def last_turn(self) -> list[int]:
        """Tokens of the last turn that was sampled; all of them without an environment."""
        return self.token_ids[self.turns[-1].start : self.turns[-1].end] if self.turns else self.token_ids

    @property
    def unfinished(self) -> bool:
        """Whether it has no end yet."""
        return self.finish_reason is None

    @property
    def waiting(self) -> bool:
        """Whether its turn has ended and the environment has not answered: no engine works on it."""
        return self.finish_reason is None and bool(self.turns) and self.turns[-1].end == len(self.token_ids)

    @property
    def turn_begun(self) -> bool:
        """Whether the turn under way has tokens."""
        return self.turn_start < len(self.token_ids)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that sampled any of its tokens: the first one's, since versions only grow."""
        return self.spans[0].version


class Verdict(StrEnum):
    """What a verifier found. The first four grade the policy; the others say why nothing was graded."""

    CORRECT = "correct"
    WRONG = "wrong"
    OPEN = "open"
    """no verifier is asked: the answer is learned from, not compared; neither right nor wrong"""
    NO_ANSWER = "no answer"
    """there is nothing to compare or run: no balanced box, no program, or the format is broken"""
    TIMEOUT = "timeout"
    """the verifier was killed at its deadline"""
    CRASH = "crash"
    """the verifier process died or raised"""
    UNVERIFIABLE = "unverifiable"
    """the ground truth itself cannot be understood by the verifier"""
    SANDBOX_REFUSED = "sandbox refused"
    """the host cannot isolate untrusted programs, so none was run"""

    @property
    def graded(self) -> bool:
        """True if the verdict says something about the completion (and not about the verifier)."""
        return self in GRADED


GRADED = frozenset({Verdict.CORRECT, Verdict.WRONG, Verdict.OPEN, Verdict.NO_ANSWER})


class Reward(msgspec.Struct, frozen=True, gc=False):
    """The reward of one completion with every component, in about [-0.1, 1.1] (Magistral, 2506.10910, section 2.2)."""

    total: float
    format: float | None
    """0 or the format weight; None where an environment grades: neither format nor language are looked at"""
    correctness: float
    """0 or the correctness weight"""
    length: float
    """0 down to minus the length weight"""
    language: float
    """0 or the language weight"""
    verdict: Verdict
    reason: str = ""
    """one line for a human: which format rule failed, what was compared"""
    consistent: bool | None = None
    """problem, reasoning and answer are in one language; None when not determined (the format failed, or None)"""
    languages: tuple[str, str, str] = ("", "", "")
    """detected language of problem, reasoning, answer; "" when undetermined"""
    answer: str | None = None
    """the extracted final answer"""
    share: float | None = None
    """share of a program's tests that passed, 1 or 0 for a right or wrong answer; None when the format failed and for
    open problems"""
    extra: dict[str, float] = {}
    """name -> weighted part of the total of every further reward"""


class Group(msgspec.Struct, omit_defaults=True):
    """All completions of one prompt; complete when every reward is there."""

    prompt: Prompt
    completions: list[Completion]
    """[group_size]"""
    rewards: list[Reward | None]
    """[group_size], None while a completion is unfinished or unverified"""
    texts: list[str] = []
    """[group_size] decoded completions, for verifiers and people only; never trained on"""
    turns: list[list[TurnText]] = []
    """[group_size] what was said in each episode; in rollout files only"""
    source: str = ""
    """where an offline group comes from; "" for one that this run sampled"""

    def __repr__(self) -> str:
        totals = [reward.total for reward in self.rewards if reward is not None]
        mean = f"{sum(totals) / len(totals):.3f}" if totals else "none yet"
        return f"Group({self.prompt.problem!r}, {len(self.completions)} completions, mean reward {mean})"

    @property
    def complete(self) -> bool:
        """True when every completion has its reward."""
        return None not in self.rewards


CONTEXT, SAMPLED, IMITATED = range(3)
"""kinds of tokens in a training sequence: context without loss, sampled by the policy, or put there to be imitated"""


class TrainSequence(msgspec.Struct, gc=False):
    """One sequence as a trainer sees it: its tokens, which of them have a loss, and what the loss needs.

    Loss tokens are those that are not CONTEXT. Example: a prompt of 2 tokens and a completion of 3 sampled ones:
    TrainSequence([5, 9, 7, 8, 2], bytes([0, 0, 1, 1, 1]), .25, [1.5], columns={"behaviour": [-.1, -2., -.3]})
    """

    token_ids: list[int]
    """[tokens]"""
    mask: bytes
    """[tokens] CONTEXT (the prompt, what an environment says), SAMPLED, or IMITATED (demonstrations, ground truths)"""
    weight: float
    """weight of each loss token in the step's loss: by loss_aggregation, e.g. 1/(groups * group_tokens)"""
    advantages: list[float] = []
    """[segments] one for each run of loss tokens; none where all are imitated"""
    group: int = 0
    """`Prompt.index`: the same for all completions of a group"""
    columns: dict[str, list[float]] = {}
    """name -> [loss tokens] log-probs, 0 for tokens that were not sampled: "behaviour" under the policy that sampled
    (the engine's), "old" under the policy at the start of the batch, where that is not the policy now, "teacher" under
    a teacher that is asked over HTTP"""
    route_files: list[RouteFile] = []
    """`Completion.routes`, which the trainer rank reads into `routes`"""
    routes: list[bytes] = []
    """[tokens or fewer] a token's bytes in these files; tokens without go where the trainer's routers send them"""
    offline: bool = False
    """this run did not sample it: it may lack "behaviour", and says nothing about how engines and trainers agree"""

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens before the first one with a loss."""
        return len(self.mask) - len(self.mask.lstrip(b"\0"))

    @property
    def loss_tokens(self) -> int:
        """Number of tokens with a loss."""
        return len(self.mask) - self.mask.count(CONTEXT)

    @property
    def segments(self) -> list[int]:
        """[segments] number of loss tokens in each run of them."""
        return [len(run) for run in self.mask.split(b"\0") if run]


class MicroBatch(msgspec.Struct):
    """Sequences that go through the model together, packed one after the other. May be empty (a dummy that keeps
    ranks in step: it still runs forward and backward, with weight zero)."""

    sequences: list[TrainSequence]
