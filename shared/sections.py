"""The sections of a settings file: each a pydantic model with defaults, ranges, and what its own values contradict.

The docstring below a field has its meaning and unit; `python -m trainer --help` prints it. No torch is imported.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from shared.jsonl import FIELDS
from shared.judge_settings import Judge
from shared.metrics import METRICS, kind_of
from shared.model_settings import Model as Model  # one of the sections
from shared.named_secrets import complain_of_url
from shared.sandbox_settings import Sandbox
from shared.section import Section

CONDITION = re.compile(r"\s*(?P<metric>[\w/]+)\s*(?P<sign>[<>])\s*(?P<number>-?\d+(?:\.\d+)?(?:e-?\d+)?)\s*")
"""form of `Stage.until`"""
STAGED: dict[str, tuple[str, ...]] = {
    "data": ("order", "pass_rate", "domains", "drop_solved_after", "offline_share"),
    "rollout": ("prompts_per_step", "group_size", "max_async_level", "reorder_window", "max_completion_tokens"),
    "reward": ("correctness", "length", "length_max", "overlong_buffer", "language", "extra", "options", "gates"),
    "optimiser": ("minibatches", "learning_rate"),
}
"""section -> settings that a stage may change: those that only the controller reads"""


class Data(Section):
    train: str = ""
    """JSONL (or .jsonl.gz, .parquet) of problems to train on, "hub:owner/name/config:split", or kinds of problems (and
    levels) that reasoning-gym generates, e.g. "reasoning_gym:countdown,chain_sum/2"; a run needs one"""
    validation: str = ""
    """the same for evaluation only; "" for none"""
    columns: dict[str, str] = {}
    """field of a row = column of your files that holds it, e.g. { problem = "question", answer = "final_answer" }, for
    training, validation and demonstrations; docs/data.md lists the published shapes that need none"""
    generate: dict[str, dict[str, Any]] = {}
    """kind of generated problems = its options, reasoning-gym's own and `size`, the number to train on (500), e.g.
    { countdown = { size = 2000, max_numbers = 4 } }"""
    order: Literal["shuffle", "file", "prioritised"] = "shuffle"
    """draw problems in a seeded random order (new each epoch), as they are in the file, or at random in proportion to
    1 - the share of right completions in their last group (before the first: their row's pass_rate)"""
    system_prompt: str = "magistral"
    """"magistral" (draft in <think>, then a summary, in the user's language), "" for none, or the text itself"""
    templates: dict[str, str] = {}
    """domain = user turn of its problems, {problem} standing for the text, e.g. { code = "{problem} Use Python." }"""
    domains: list[str] = []
    """train only on problems of these domains, e.g. ["math"]; [] for all"""
    pass_rate: tuple[float, float] = (0.0, 1.0)
    """train only on problems whose row says a pass_rate within these bounds (rows without one always count)"""
    open_share: float = Field(0.0, ge=0, le=1)
    """share of the problems with an answer that hide it from the verifier: "jepo" learns from the answer itself"""
    drop_solved_after: int = Field(0, ge=0)
    """at a change of stage, problems that were solved by all completions of their last so many groups are drawn no
    more; 0 keeps them"""
    offline: str = ""
    """completions to learn from in addition to the run's own: a run's folder (its rollouts), or JSONL of {"problem",
    "completion", "reward"}, pairs and others (docs/offline.md); "" for none"""
    offline_share: float = Field(0.5, ge=0, lt=1)
    """share of the groups of a batch that are offline, in addition to rollout.prompts_per_step sampled ones"""

    def own_contradictions(self) -> Iterator[str]:
        """Yield what the names and bounds of the problems contradict."""
        if self.train and self.train == self.validation and not self.train.startswith("reasoning_gym:"):
            yield (
                f'data.train and data.validation are both "{self.train}": evaluation would be on training problems; '
                'give another file, or data.validation = ""'
            )
        if not 0 <= self.pass_rate[0] <= self.pass_rate[1] <= 1:
            yield f"data.pass_rate = {list(self.pass_rate)} must be [least, most] with 0 <= least <= most <= 1"
        for field in self.columns:
            if field not in FIELDS:
                yield f"data.columns.{field}: a row has no such field; it may have {', '.join(FIELDS)}"
        for domain, template in self.templates.items():
            if template.count("{problem}") != 1:
                yield f'data.templates.{domain} = "{template}" must hold {{problem}} exactly once'


class Placement(Section):
    trainers: int = Field(1, ge=1)
    """number of trainer ranks (FSDP2)"""
    engines: int = Field(1, ge=1)
    """number of rollout ranks, each with one vLLM engine"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device of trainers and engines: "auto" is the GPUs where the machine has some, and refuses to start where it has
    some that cannot be used; "cpu" needs the CPU builds of torch and vLLM"""
    colocate: Literal["auto", "resident", "turns", "never"] = "auto"
    """how trainers and engines share the GPUs of a node that has fewer than both need: "resident", both stay in GPU
    memory; "turns", only those who work do (the engines sleep, the trainers' weights and moments move to host memory),
    which needs rollout.max_async_level = 0; "auto", the first of them that fits; "never", refuse"""
    replicas: int | None = Field(None, ge=1)
    """copies of the model among the trainers (HSDP), each sharded over neighbouring ranks; only sums of gradients pass
    between them. Not given: one for each node, or as many as fit"""
    tensor: int = Field(1, ge=1)
    """neighbouring trainers that split the layers and tables of our own decoder, and train on the same sequences"""
    context: int = Field(1, ge=1)
    """neighbouring trainers that split the tokens of each micro-batch, so that longer sequences fit"""
    experts: int = Field(1, ge=1)
    """neighbouring trainers that split the experts of each layer of a mixture, to which tokens travel"""


class Rollout(Section):
    prompts_per_step: int = Field(32, ge=1)
    """groups in one batch"""
    group_size: int = Field(16, ge=2)
    """completions per prompt"""
    max_completion_tokens: int = Field(128, ge=1)
    """a completion is cut at this length"""
    temperature: float = Field(1.0, gt=0)
    """sampling temperature; the trainer applies the same"""
    max_async_level: int = Field(2, ge=0)
    """batches that sampling may run ahead of training; 0 is synchronous and deterministic"""
    reorder_window: int = Field(0, ge=0)
    """groups after the oldest one that may be trained before it; 0 means prompts_per_step"""
    fixed_staleness: bool = False
    """train a batch only when the `max_async_level` batches after it are complete too, so that all its tokens are
    `max_async_level` versions old, whatever side is faster: for experiments, since sampling and training then take
    turns"""
    max_sequences: int = Field(256, ge=1)
    """completions that one engine decodes at once"""
    cache_bytes: int | None = Field(None, gt=0)
    """KV cache on each GPU of an engine (on the CPU: of the engine), bytes. Not given: what is free on a GPU that an
    engine has for itself, what the open completions need on one that it shares, 256 MiB on the CPU"""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of one engine (CPU: 1)"""
    transport: Literal["auto", "shm", "cuda_ipc", "network"] = "auto"
    """how weights reach the engines: shared memory (CPU, one node), CUDA IPC (GPU, one node), network (NCCL or gloo)"""
    max_restarts: int = Field(5, ge=0)
    """an engine that died is started again this many times"""
    keep_bytes: int = Field(20_000_000_000, ge=0)
    """most bytes of the run's rollouts/: the files of its oldest steps make room for new ones; 0 keeps all"""

    def own_contradictions(self) -> Iterator[str]:
        """Yield contradictions of the order in which groups are trained, and of engines and transport."""
        if self.max_async_level == 0 and self.reorder_window > self.prompts_per_step:
            yield (
                f"rollout.reorder_window = {self.reorder_window} exceeds rollout.prompts_per_step = "
                f"{self.prompts_per_step}, but with rollout.max_async_level = 0 only one step's groups are open: set "
                "rollout.reorder_window = 0, or raise rollout.max_async_level"
            )
        if self.fixed_staleness and self.max_async_level == 0:
            yield (
                "rollout.fixed_staleness has no effect with rollout.max_async_level = 0: raise it, or remove "
                "fixed_staleness"
            )
        elif self.fixed_staleness and self.reorder_window not in (0, self.prompts_per_step):
            yield (
                f"rollout.reorder_window = {self.reorder_window} has no effect with rollout.fixed_staleness = true, "
                "which trains the oldest groups first: set rollout.reorder_window = 0, or remove fixed_staleness"
            )
        if self.tensor_parallel > 1 and self.transport == "shm":
            yield (
                f'rollout.tensor_parallel = {self.tensor_parallel} needs GPUs, but rollout.transport = "shm" is the '
                'CPU\'s: set rollout.transport = "auto" or rollout.tensor_parallel = 1'
            )


Refusal = Literal["empty", "thoughtless", "hidden", "several", "unstated", "restated", "foreign"]


class RewardWeights(Section):
    format: float = 0.1
    """reward for a well-formed completion; without it the total is 0"""
    correctness: float = 0.9
    """added when the final answer is right"""
    length: float = 0.1
    """taken away, linearly over the last `overlong_buffer` tokens before `length_max`"""
    language: float = 0.1
    """added when problem, reasoning and answer are in one language"""
    length_max: int = Field(0, ge=0)
    """tokens at which the length penalty is full; 0 means rollout.max_completion_tokens"""
    overlong_buffer: int = Field(32, ge=1)
    """tokens over which the length penalty grows"""
    workers: int = Field(1, ge=1)
    """verifier processes"""
    deadline_s: float = Field(5.0, gt=0)
    """a verification that takes longer is killed and counted as a timeout"""
    max_failure_share: float = Field(0.05, gt=0, le=1)
    """the run stops when more than this share of recent verdicts is timeout, crash, unverifiable or sandbox refused"""
    refuse: list[Refusal] = ["empty", "thoughtless", "hidden", "several", "restated", "foreign"]
    """responses that earn nothing although the paper's rules would pay (docs/rewards.md): a box without content;
    reasoning that is empty, one or two words, one thing repeated or the problem copied; a box in a comment or code; an
    answer that is one of several; a computation still to be done where the ground truth is a plain number; foreign
    words in \\text{}, code and boxes. "unstated", off by default, wants the answer as a last line of its own. [] is the
    paper's rules alone"""
    extra: dict[str, Annotated[float, Field(ge=0)]] = {}
    """further rewards, name = weight, e.g. { repetition = 0.1 }; docs/rewards.md lists them and shows how to add one"""
    options: dict[str, dict[str, Any]] = {}
    """options of rewards by name, e.g. { cosine_length = { right = [1, 0.5] }, language = { undetermined = "bonus" } };
    each reward checks its own, docs/rewards.md lists them"""
    plugins: list[str] = []
    """Python files that define more rewards"""
    judge: Judge = Judge()
    judges: dict[str, Judge] = {}
    """further judges, each a reward of its name for reward.extra, e.g. { clear = { url = "...", model = "..." } }"""
    gates: dict[str, float] = {}
    """reward, judge, "correctness" or "language" = least value: a response below one of them earns nothing, as if its
    format were broken"""
    sandbox: Sandbox = Sandbox()

    @field_validator("refuse", mode="before")
    @classmethod
    def _has_known_rules(cls, names: Any) -> Any:
        """Raise ValueError for a rule that has moved to an example."""
        if isinstance(names, list) and "denied" in names:
            raise ValueError(
                'reward.refuse: "denied" is a reward of examples/manners now. Write "several" in its place, which '
                "refuses an answer that is one of several; for the rest add to [reward] "
                'plugins = ["examples/manners/reward.py"] and gates = { manners = 1 }'
            )
        return names

    def resolved(self, max_completion_tokens: int) -> RewardWeights:
        """The same with length_max filled in."""
        return self.model_copy(update={"length_max": self.length_max or max_completion_tokens})

    def own_contradictions(self) -> Iterator[str]:
        """Yield that nothing is rewarded, options of rewards that are not, and what the sandbox contradicts."""
        yield from self.sandbox.own_contradictions()
        if self.correctness == 0 and self.language == 0 and self.format == 0 and not any(self.extra.values()):
            yield "reward.format, reward.correctness and reward.language are 0: nothing is rewarded, set one of them"
        for name in sorted(self.options.keys() - self.extra.keys() - {"language"}):
            yield f"reward.options.{name} has no effect: give reward.extra.{name} a weight, or remove it"
        for name, judge in [("judge", self.judge), *((f"judges.{name}", judge) for name, judge in self.judges.items())]:
            yield from complain_of_url(f"reward.{name}.url", judge.url)
            yield from complain_of_url(f"reward.{name}.critic.url", judge.critic.url)


Beta = Annotated[float, Field(ge=0, lt=1)]


class Optimiser(Section):
    learning_rate: float = Field(1e-6, gt=0)
    """peak learning rate of AdamW"""
    warmup_steps: int = Field(5, ge=0)
    """linear warm-up, steps"""
    min_lr_ratio: float = Field(1.0, ge=0, le=1)
    """decay to this share of the peak at the last step"""
    decay: Literal["linear", "cosine"] = "linear"
    """how it comes down; cosine as in open-r1's recipes"""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW decoupled weight decay (matrices only)"""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """rates of the averages of AdamW's moments; TRL and verl have 0.9 and 0.999"""
    epsilon: float = Field(1e-8, gt=0)
    """number that AdamW adds to the root of the second moment"""
    max_grad_norm: float = Field(1.0, gt=0)
    """gradients are scaled down to this global norm"""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """forward and backward type; master weights, moments and reductions are always float32. On a CPU without matrix
    units (AMX) float32 is the faster one, unless it is AMD's with bfloat16 instructions (AVX512-BF16)"""
    micro_batch_tokens: int = Field(8192, ge=1)
    """token budget of one micro-batch; a longer sequence gets one of its own"""
    minibatches: int = Field(1, ge=1)
    """optimiser steps on each batch of rollout.prompts_per_step groups; more than 1 trains the later ones off-policy"""
    activation_bytes: int | None = Field(None, ge=0)
    """memory for what the layers keep of one micro-batch for the backward pass; where it is too small, as many layers
    as needed are computed twice (all: a third more time), and then a GPU leaves their inputs on the host. 0: both"""


class Lora(Section):
    rank: int = Field(0, ge=0, le=512)
    """train low-rank adapters of this rank instead of all weights (docs/lora.md); 0 trains all"""
    alpha: float = Field(32.0, gt=0)
    """an adapter's product is scaled by alpha / rank"""
    targets: Literal["all-linear"] | list[str] = "all-linear"
    """layers with adapters: all linear ones but the head; or a list: ["q_proj", "v_proj"], ["all-linear", "experts"]"""

    def own_contradictions(self) -> Iterator[str]:
        """Yield that nothing is adapted."""
        if self.targets == []:
            yield 'lora.targets = [] adapts no layer: name some, or set lora.targets = "all-linear"'


class Sft(Section):
    demonstrations: str = ""
    """JSONL of {problem, completion} to imitate before RL; "" for none"""
    steps: int = Field(0, ge=0)
    """SFT steps"""
    batch: int = Field(64, ge=1)
    """demonstrations per SFT step"""
    learning_rate: float = Field(3e-3, gt=0)
    """peak learning rate of the SFT steps"""
    general: str = ""
    """JSONL of {problem, completion}: general instructions, imitated in addition to the demonstrations; "" for none"""
    general_share: float = Field(0.1, ge=0, lt=1)
    """share of an SFT batch that is drawn from `general`"""

    def own_contradictions(self) -> Iterator[str]:
        """Yield that demonstrations are missing."""
        if self.steps and not self.demonstrations:
            yield f"sft.steps = {self.steps} needs demonstrations: set sft.demonstrations to a file, or sft.steps to 0"


class Checkpoint(Section):
    every: int = Field(10, ge=0)
    """steps between checkpoints; 0 for only the last"""
    keep: int = Field(2, ge=1)
    """newest checkpoints to keep"""
    on_error: Literal["stop", "continue"] = "stop"
    """whether the run stops or continues after a checkpoint that cannot be written (disk full)"""


class Evaluate(Section):
    every: int = Field(0, ge=0)
    """steps between evaluations on data.validation; 0 for only before and after"""
    problems: int = Field(256, ge=1)
    """validation problems of one evaluation"""
    samples: int = Field(1, ge=1)
    """completions of each of them at rollout.temperature; more than 1 also gives pass@k and maj@k"""
    greedy: bool = True
    """evaluate greedy decoding too, before and after training"""
    best: Literal["accuracy", "pass_at_k", "majority", "consistency", "reward"] = "accuracy"
    """the version whose evaluation is highest in this is kept and exported as `best`"""

    def own_contradictions(self) -> Iterator[str]:
        """Yield that the best version is chosen by something that is not measured."""
        if self.best in ("majority", "pass_at_k") and self.samples < 2:
            yield (
                f'evaluate.best = "{self.best}" needs several completions a problem, but evaluate.samples = '
                f"{self.samples}: raise it, or choose another metric"
            )


class Stage(Section):
    name: str
    """name of the stage, for logs and metrics"""
    until_step: int = Field(0, ge=0)
    """the stage ends with this optimiser step; 0 for no such limit"""
    until: str = ""
    """the stage ends when this holds for the mean over `over_steps` steps, e.g. "accuracy > 0.8" or "length/mean > 60"
    (any metric of a training step); "" for no such condition"""
    over_steps: int = Field(5, ge=1)
    """steps of the stage over which `until` takes its mean"""
    data: dict[str, Any] = {}
    """settings of [data] from this stage on: order, pass_rate, domains, drop_solved_after, offline_share"""
    rollout: dict[str, Any] = {}
    """settings of [rollout] from this stage on: prompts_per_step, group_size, max_async_level, reorder_window,
    max_completion_tokens"""
    reward: dict[str, Any] = {}
    """settings of [reward] from this stage on: correctness, length, length_max, overlong_buffer, language, extra,
    options, gates"""
    objective: dict[str, Any] = {}
    """settings of [objective] from this stage on; with a `name`, all of them, without, those that change"""
    optimiser: dict[str, Any] = {}
    """settings of [optimiser] from this stage on: minibatches, learning_rate"""

    def own_contradictions(self) -> Iterator[str]:
        """Yield a condition that is none, and settings that no stage may change."""
        where, condition = f"stages.{self.name}", CONDITION.fullmatch(self.until)
        if self.until and condition is None:
            yield f'{where}.until = "{self.until}" must read "METRIC > NUMBER" or "METRIC < NUMBER"'
        if condition is not None and condition["metric"] not in METRICS:
            near = difflib.get_close_matches(condition["metric"], METRICS, n=1, cutoff=0)[0]
            yield f'{where}.until = "{self.until}": no metric has this name; did you mean {near}?'
        elif condition is not None and kind_of({condition["metric"]: 0.0}) != "train":
            yield f'{where}.until = "{self.until}": a stage can only end by a metric that every training step has'
        for section, allowed in STAGED.items():
            for name in getattr(self, section):
                if name not in allowed:
                    choices = ", ".join(f"{section}.{other}" for other in allowed)
                    yield f"{where}.{section}.{name} cannot change during a run; a stage may set {choices}"


class Sync(Section):
    verify: bool = True
    """check version and checksums of every engine after every weight update, and log-probs of fixed sequences after
    every second one, which may differ by 1e-4 a token on average in float32, 0.05 in float16, 0.25 in bfloat16"""


class Deadlines(Section):
    start_s: float = Field(300, gt=0)
    """all ranks are up, models loaded; the time to read this model from a slow disk is added, and on GPUs that to
    compile and to capture graphs. A teacher at an address, which may have to start too, has as long for the
    log-probs of one completion"""
    step_s: float = Field(3600, gt=0)
    """one accumulate or optimiser call; this and other calls and waits end sooner after ten times the longest of their
    kind so far, at least two minutes and a tenth of the setting. A full batch of groups may take twice as long"""
    sync_s: float = Field(120, gt=0)
    """one weight update with its proof. Who could delay one is found before it ends: a rank that is silent for half as
    long counts as hung, and an engine with running requests, no new token and no answer for this long is killed and
    restarted (earlier after ten times its longest silence so far, if that is at least a quarter of this)"""

    @property
    def heartbeat_s(self) -> float:
        """Seconds of silence after which a rank counts as hung."""
        return self.sync_s / 2

    @property
    def token_s(self) -> float:
        """Seconds after which a busy engine that gives neither a token nor an answer is killed and restarted."""
        return self.sync_s


class Prepare(Section):
    script: str = ""
    """Python file with a function prepare(folder, options, seed), run once, before anything is read, to write files
    into the folder made/ of the run, where model.path and the files of [data] and [sft] are that begin with
    made/; "" for none"""
    options: dict[str, Any] = {}
    """options for the script, which checks them itself"""
