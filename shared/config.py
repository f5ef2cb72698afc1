"""The settings of a run, as pydantic models with defaults, ranges and contradictions.

Every field carries its meaning and unit in the docstring below it; `python -m trainer --help` prints them.
What it does not: read files or options (settings_file.py). Nothing here imports torch.
Who calls this: every room; `trainer/__main__.py` reads a file once, every rank receives the same resolved settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """Base of all sections: unknown keys, infinities and later changes are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False)


class Model(Section):
    path: str = "tiny"
    """Hugging Face model folder or Hub id to start from; "tiny" builds the quickstart's model on the spot"""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """type of the weights on the wire and in the engines"""
    max_tokens: int = Field(512, gt=0)
    """longest prompt + completion, tokens"""


class Data(Section):
    train: str = "stories"
    """JSONL (or .jsonl.gz) of problems to train on; "stories" generates the quickstart's problems"""
    held_out: str = "stories"
    """JSONL of problems for evaluation only; "" for none"""
    order: Literal["shuffle", "file"] = "shuffle"
    """draw problems in a seeded random order (new each epoch), or as they stand in the file"""
    system_prompt: str = "magistral"
    """"magistral" (draft in <think>, then a summary, in the user's language), "" for none, or the text itself"""


class Placement(Section):
    trainers: int = Field(1, ge=1)
    """number of trainer ranks (FSDP2)"""
    engines: int = Field(1, ge=1)
    """number of rollout ranks, each with one vLLM engine"""


class Rollout(Section):
    prompts_per_step: int = Field(32, ge=1)
    """groups in one optimiser step"""
    group_size: int = Field(16, ge=2)
    """completions per prompt"""
    max_completion_tokens: int = Field(128, ge=1)
    """a completion is cut at this length"""
    temperature: float = Field(1.0, gt=0)
    """sampling temperature; the trainer applies the same"""
    top_p: float = Field(1.0, gt=0, le=1)
    """must be 1 for training: a truncated distribution biases the importance ratio"""
    top_k: int = Field(0, ge=0)
    """must be 0 (off) for training, as top_p"""
    lead: int = Field(2, ge=0)
    """optimiser steps that sampling may run ahead of training; 0 is synchronous and deterministic"""
    window: int = Field(0, ge=0)
    """groups behind the oldest one that may be trained before it; 0 means prompts_per_step"""
    max_sequences: int = Field(256, ge=1)
    """completions that one engine decodes at once"""
    cache_bytes: int = Field(256 << 20, gt=0)
    """KV cache of one engine, bytes"""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of one engine (CPU: 1)"""
    threads: int = Field(1, ge=1)
    """CPU threads of one engine"""
    transport: Literal["auto", "shm", "cuda_ipc", "network"] = "auto"
    """how weights reach the engines: shared memory (CPU, one node), CUDA IPC (GPU, one node), network (NCCL or gloo)"""
    max_restarts: int = Field(5, ge=0)
    """an engine that died is started again this many times"""


class Judge(Section):
    url: str = ""
    """address of an OpenAI-compatible API up to its version, e.g. "http://127.0.0.1:8000/v1"; asked only when
    reward.extra names llm_judge"""
    model: str = ""
    """model name as that API knows it"""
    key_variable: str = ""
    """environment variable that holds the API key; "" for none (the key itself never stands in a settings file)"""
    instructions: str = (
        "Grade how clear, complete and honest the solution is for a reader who has only the problem and the true "
        "answer. 10 is best, 0 is worst."
    )
    """what the judge is told to look at"""
    deadline_s: float = Field(60.0, gt=0)
    """all attempts at one completion together; later it is not graded"""


class Sandbox(Section):
    isolation: Literal["required", "none"] = "required"
    """"required" refuses to run programs of the model where the host cannot isolate them; "none" runs them all the
    same: for trusted programs only"""
    boxes: int = Field(0, ge=0)
    """programs that run at once; 0 means one less than there are cores"""
    test_s: float = Field(4.0, gt=0)
    """a program is stopped after so many seconds of one test"""
    memory_bytes: int = Field(300 << 20, ge=16 << 20)
    """memory of a program, bytes"""
    compile_s: float = Field(10.0, gt=0)
    """compiling a C++ program is stopped after so many seconds"""
    max_tests: int = Field(20, ge=1)
    """of a problem with more tests so many are drawn, the same for all completions of a group"""


class RewardWeights(Section):
    format: float = 0.1
    """reward for a well-formed completion; without it the total is 0"""
    correctness: float = 0.9
    """added when the final answer is right"""
    length: float = 0.1
    """taken away, linearly over the last `length_cache` tokens before `length_max`"""
    language: float = 0.1
    """added when problem, thoughts and answer are in one language"""
    length_max: int = Field(0, ge=0)
    """tokens at which the length penalty is full; 0 means rollout.max_completion_tokens"""
    length_cache: int = Field(32, ge=1)
    """tokens over which the length penalty grows"""
    workers: int = Field(1, ge=1)
    """verifier processes"""
    deadline_s: float = Field(5.0, gt=0)
    """a verification that takes longer is killed and counted as a timeout"""
    max_failure_share: float = Field(0.05, gt=0, le=1)
    """the run stops when more than this share of recent verdicts is timeout, crash, unverifiable or sandbox refused"""
    undetermined: Literal["neutral", "nothing", "bonus"] = "neutral"
    """what a part with too few words to tell its language does to the language bonus: neither give nor take it, lose
    it, or give it even to a response without any words"""
    extra: dict[str, Annotated[float, Field(ge=0)]] = {}
    """further rewards, name = weight, e.g. { repetition = 0.1 }; docs/rewards.md lists them and shows how to add one"""
    log_sigmoid: dict[str, float] = {}
    """name = reference: that extra reward counts as log sigmoid(value - reference), so that sums mean "and\""""
    plugins: list[str] = []
    """Python files that define more rewards"""
    cosine_right: tuple[float, float] = (1.0, 0.5)
    """cosine_length of a right answer of no tokens, and just below length_max"""
    cosine_wrong: tuple[float, float] = (-1.0, 0.0)
    """cosine_length of a wrong answer of no tokens, and just below length_max: a longer attempt is forgiven more"""
    repetition_words: int = Field(20, ge=1)
    """so many words in a row that were said before count as a repetition; a Han or kana character is a word"""
    judge: Judge = Judge()
    sandbox: Sandbox = Sandbox()

    def resolved(self, max_completion_tokens: int) -> RewardWeights:
        """The same with length_max filled in."""
        return self.model_copy(update={"length_max": self.length_max or max_completion_tokens})


class Objective(Section):
    loss: Literal["clip_higher", "grpo", "truncated_importance", "reinforce"] = "clip_higher"
    """token loss: Magistral's clip-higher, symmetric clip, AIPO's one-sided truncated weight, or plain"""
    clip_low: float = Field(0.2, gt=0)
    """importance ratio is clipped below 1 - clip_low"""
    clip_high: float = Field(0.28, gt=0)
    """importance ratio is clipped above 1 + clip_high"""
    truncate: float = Field(2.0, gt=0)
    """cap of the importance weight for loss = "truncated_importance\""""
    advantage: Literal["minibatch", "group", "none"] = "minibatch"
    """scale of the group-centred advantage: minibatch or group standard deviation, or not scaled"""
    normaliser: Literal["group_tokens", "batch_tokens", "sequence", "constant"] = "group_tokens"
    """what a token's loss is divided by"""
    diverse_by: Literal["total", "correctness", "off"] = "total"
    """a group whose values of this are all equal has no signal and is not trained; "off" trains every group"""


class Optimiser(Section):
    learning_rate: float = Field(1e-6, gt=0)
    """peak learning rate of AdamW"""
    warmup_steps: int = Field(5, ge=0)
    """linear warm-up, steps"""
    decay_to: float = Field(1.0, ge=0, le=1)
    """linear decay to this share of the peak at the last step"""
    beta1: float = Field(0.9, ge=0, lt=1)
    """AdamW first moment"""
    beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW second moment"""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW epsilon"""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW decoupled weight decay (matrices only)"""
    max_grad_norm: float = Field(1.0, gt=0)
    """gradients are scaled down to this global norm"""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """forward and backward type; master weights, moments and reductions are always float32"""
    micro_batch_tokens: int = Field(8192, ge=1)
    """token budget of one micro-batch; a longer sequence gets one of its own"""
    recompute: bool = False
    """recompute layer activations in the backward pass (less memory, a third more time)"""
    threads: int = Field(1, ge=1)
    """CPU threads of one trainer rank"""


class ColdStart(Section):
    demonstrations: str = ""
    """JSONL of {problem, completion} to imitate before RL; "stories" generates imperfect ones; "" for none"""
    steps: int = Field(0, ge=0)
    """supervised steps"""
    batch: int = Field(64, ge=1)
    """demonstrations per supervised step"""
    learning_rate: float = Field(3e-3, gt=0)
    """peak learning rate of the supervised steps"""


class Checkpoint(Section):
    every: int = Field(10, ge=0)
    """steps between checkpoints; 0 for only the last"""
    keep: int = Field(2, ge=1)
    """newest checkpoints to keep"""
    on_error: Literal["stop", "continue"] = "stop"
    """what a checkpoint that cannot be written (disk full) does to the run"""


class Evaluate(Section):
    every: int = Field(0, ge=0)
    """steps between evaluations on data.held_out; 0 for only before and after"""
    problems: int = Field(256, ge=1)
    """held-out problems of one evaluation"""


class Sync(Section):
    proof: bool = True
    """check version, checksums and log-probs of every engine after every weight update"""
    max_difference: float = Field(0.0, ge=0)
    """largest mean |log-prob difference| on the canary; 0 means 1e-4 in float32, 0.1 in bfloat16"""


class Deadlines(Section):
    start_s: float = Field(300, gt=0)
    """all ranks are up, models loaded"""
    heartbeat_s: float = Field(60, gt=0)
    """silence after which a rank counts as hung"""
    step_s: float = Field(3600, gt=0)
    """one accumulate or optimiser call"""
    sync_s: float = Field(120, gt=0)
    """one weight update with its proof"""
    batch_s: float = Field(7200, gt=0)
    """waiting for a full batch of groups"""
    token_s: float = Field(120, gt=0)
    """an engine with running requests and no new token for this long is killed and restarted"""


class Stories(Section):
    languages: list[str] = ["en", "fr", "de", "es", "it", "ru", "zh"]
    """languages of the generated problems"""
    problems: int = Field(4000, ge=1)
    """generated training problems"""
    operations: tuple[int, int] = (2, 3)
    """fewest and most additions and subtractions in a problem"""


class Config(Section):
    name: str = "quickstart"
    """the run's folder is runs_dir/name"""
    runs_dir: str = "runs"
    """parent of run folders"""
    seed: int = 0
    """seeds of data order, sampling and initial weights derive from this"""
    steps: int = Field(60, ge=0)
    """optimiser steps of reinforcement learning"""
    model: Model = Model()
    data: Data = Data()
    placement: Placement = Placement()
    rollout: Rollout = Rollout()
    reward: RewardWeights = RewardWeights()
    objective: Objective = Objective()
    optimiser: Optimiser = Optimiser()
    cold_start: ColdStart = ColdStart()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    sync: Sync = Sync()
    deadlines: Deadlines = Deadlines()
    stories: Stories = Stories()

    @model_validator(mode="after")
    def refuse_contradictions(self) -> Config:
        """Raise with every contradiction, one line each."""
        found = [*_sampling_contradictions(self), *_reward_contradictions(self), *_data_contradictions(self)]
        if found:
            raise ValueError("\n".join(found))
        return self

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.runs_dir) / self.name

    @property
    def world_size(self) -> int:
        """Ranks of the launch: controller, trainers, engines."""
        return 1 + self.placement.trainers + self.placement.engines

    @property
    def window(self) -> int:
        """Take-window in groups."""
        return self.rollout.window or self.rollout.prompts_per_step

    @property
    def max_staleness(self) -> int:
        """Bound of a trained token's age in versions: lead + ceil((window - 1) / prompts_per_step)."""
        return self.rollout.lead + -(-(self.window - 1) // self.rollout.prompts_per_step) if self.rollout.lead else 0


def _sampling_contradictions(config: Config) -> Iterator[str]:
    rollout, most = config.rollout, config.model.max_tokens
    if rollout.top_p < 1 or rollout.top_k > 0:
        # until the kept set of every token is replayed in the trainer, its log-probs are of another distribution
        yield (
            f"rollout.top_p = {rollout.top_p} and rollout.top_k = {rollout.top_k}: training needs rollout.top_p = 1 "
            "and rollout.top_k = 0, because a truncated distribution biases the importance ratio"
        )
    if rollout.max_completion_tokens >= most:
        yield (
            f"rollout.max_completion_tokens = {rollout.max_completion_tokens} leaves no room for a prompt in "
            f"model.max_tokens = {most}: lower the first or raise the second"
        )
    if rollout.lead == 0 and rollout.window > rollout.prompts_per_step:
        yield (
            f"rollout.window = {rollout.window} exceeds rollout.prompts_per_step = {rollout.prompts_per_step}, but "
            "with rollout.lead = 0 only one step's groups are open: set rollout.window = 0, or raise rollout.lead"
        )
    if rollout.tensor_parallel > 1 and rollout.transport == "shm":
        yield (
            f'rollout.tensor_parallel = {rollout.tensor_parallel} needs GPUs, but rollout.transport = "shm" is the '
            'CPU\'s: set rollout.transport = "auto" or rollout.tensor_parallel = 1'
        )


def _reward_contradictions(config: Config) -> Iterator[str]:
    reward = config.reward
    full = reward.length_max or config.rollout.max_completion_tokens
    name = "reward.length_max" if reward.length_max else "rollout.max_completion_tokens"
    if reward.correctness == 0 and reward.language == 0 and reward.format == 0 and not any(reward.extra.values()):
        yield "reward.format = 0, reward.correctness = 0 and reward.language = 0: nothing is rewarded, set one of them"
    for extra in sorted(reward.log_sigmoid.keys() - reward.extra.keys()):
        yield f"reward.log_sigmoid.{extra} transforms nothing: give reward.extra.{extra} a weight, or remove it"
    if reward.length and reward.length_cache > full:
        yield (
            f"reward.length_cache = {reward.length_cache} exceeds {name} = {full}: the length penalty would begin "
            "below zero tokens; lower the first"
        )
    if reward.length and full - reward.length_cache >= config.rollout.max_completion_tokens:
        yield (
            f"reward.length_max = {full} less reward.length_cache = {reward.length_cache} is not below "
            f"rollout.max_completion_tokens = {config.rollout.max_completion_tokens}: the length penalty could never "
            "apply; lower reward.length_max, or set reward.length = 0"
        )


def _data_contradictions(config: Config) -> Iterator[str]:
    data, stories, start = config.data, config.stories, config.cold_start
    if "/" in config.name or config.name in ("", ".", ".."):
        yield f'name = "{config.name}" must be the name of one folder inside runs_dir = "{config.runs_dir}"'
    if data.train == data.held_out and data.train != "stories":
        yield (
            f'data.train and data.held_out are both "{data.train}": evaluation would be on training problems; give '
            'another file, or data.held_out = ""'
        )
    if config.evaluate.every and not data.held_out:
        yield f'evaluate.every = {config.evaluate.every} needs problems, but data.held_out = "": set one of them'
    if start.steps and not start.demonstrations:
        yield (
            f'cold_start.steps = {start.steps} needs demonstrations, but cold_start.demonstrations = "": set a file, '
            "or cold_start.steps = 0"
        )
    if not stories.languages or len(set(stories.languages)) < len(stories.languages):
        yield f"stories.languages = {stories.languages} must name at least one language, each once"
    if not 1 <= stories.operations[0] <= stories.operations[1]:
        yield f"stories.operations = {list(stories.operations)} must be [fewest, most] with 1 <= fewest <= most"
