"""The settings of a run, as pydantic models with defaults, ranges and contradictions.

Every field carries its meaning and unit in the docstring below it; `python -m trainer --help` prints them.
Nothing here imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from shared.contradictions import STAGED, contradictions
from shared.section import Section


class Model(Section):
    path: str = ""
    """Hugging Face model folder or Hub id to start from; a run needs one"""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """type of the weights on the wire and in the engines; float16 rounds to 11 bits instead of 8, so that engines and
    trainers agree better (Qi et al. 2025), but a model whose activations exceed 65,504 stops with NonFinite"""
    max_tokens: int = Field(512, gt=0)
    """longest prompt + completion, tokens"""


class Data(Section):
    train: str = ""
    """JSONL (or .jsonl.gz) of problems to train on; a run needs one"""
    validation: str = ""
    """JSONL of problems for evaluation only; "" for none"""
    order: Literal["shuffle", "file"] = "shuffle"
    """draw problems in a seeded random order (new each epoch), or as they stand in the file"""
    system_prompt: str = "magistral"
    """"magistral" (draft in <think>, then a summary, in the user's language), "" for none, or the text itself"""
    templates: dict[str, str] = {}
    """domain = user turn of its problems, {problem} standing for the text, e.g. { code = "{problem} Use Python." }"""
    domains: list[str] = []
    """train only on problems of these domains, e.g. ["math"]; [] for all"""
    pass_rate: tuple[float, float] = (0.0, 1.0)
    """train only on problems whose row says a pass_rate within these bounds (rows without one always count)"""
    open_share: float = Field(0.0, ge=0, le=1)
    """share of the training problems, of those whose answer a verifier compares, that have it hidden from the verifier:
    objective.name = "jepo" learns from the answers themselves"""
    drop_solved_after: int = Field(0, ge=0)
    """at a change of stage, problems that were solved by all completions of their last so many groups are drawn no
    more; 0 keeps them"""


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
    max_async_level: int = Field(2, ge=0)
    """optimiser steps that sampling may run ahead of training; 0 is synchronous and deterministic"""
    reorder_window: int = Field(0, ge=0)
    """groups behind the oldest one that may be trained before it; 0 means prompts_per_step"""
    fixed_staleness: bool = False
    """train a batch only when the `max_async_level` batches after it are complete too, so that all its tokens are
    `max_async_level` versions old, whatever side is faster: for experiments, since sampling and training then take
    turns"""
    max_sequences: int = Field(256, ge=1)
    """completions that one engine decodes at once"""
    cache_bytes: int = Field(256 << 20, gt=0)
    """KV cache on each GPU of an engine (on the CPU: of the engine), bytes"""
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
    max_concurrency: int = Field(0, ge=0)
    """programs that run at once; 0 means one less than there are cores"""
    test_s: float = Field(4.0, gt=0)
    """a program is stopped after so many seconds of one test"""
    memory_bytes: int = Field(300 << 20, ge=16 << 20)
    """memory of a program, bytes"""
    compile_s: float = Field(10.0, gt=0)
    """compiling a C++ program is stopped after so many seconds"""
    max_tests: int = Field(20, ge=1)
    """of a problem with more tests so many are drawn, the same for all completions of a group"""


Refusal = Literal["empty", "thoughtless", "hidden", "denied", "unstated", "restated", "foreign"]


class RewardWeights(Section):
    format: float = 0.1
    """reward for a well-formed completion; without it the total is 0"""
    correctness: float = 0.9
    """added when the final answer is right"""
    length: float = 0.1
    """taken away, linearly over the last `overlong_buffer` tokens before `length_max`"""
    language: float = 0.1
    """added when problem, thoughts and answer are in one language"""
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
    undetermined: Literal["neutral", "nothing", "bonus"] = "neutral"
    """what a part with too few words to tell its language does to the language bonus: neither give nor take it, lose
    it, or give it even to a response without any words"""
    refuse: list[Refusal] = ["empty", "thoughtless", "hidden", "denied", "restated", "foreign"]
    """what earns nothing although the paper's rules would pay for it (docs/rewards.md): a box without content; thoughts
    that are empty, one word, one thing repeated or the problem copied; a box in a comment or in code; an answer that is
    denied, guessed or one of several; a computation still to be done where the true answer is a plain number; foreign
    words in \\text{}, code and boxes. "unstated", off by default, wants the answer as a last line of its own. [] is the
    paper's rules alone"""
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


class Optimiser(Section):
    learning_rate: float = Field(1e-6, gt=0)
    """peak learning rate of AdamW"""
    warmup_steps: int = Field(5, ge=0)
    """linear warm-up, steps"""
    min_lr_ratio: float = Field(1.0, ge=0, le=1)
    """linear decay to this share of the peak at the last step"""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW decoupled weight decay (matrices only)"""
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
    as needed are computed twice (0: all, a third more time). Not given: none is"""
    threads: int = Field(1, ge=1)
    """CPU threads of one trainer rank; as many as there are cores also use what engines beside it leave idle"""


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
    """JSONL of {problem, completion}: general instructions, imitated beside the demonstrations; "" for none"""
    general_share: float = Field(0.1, ge=0, lt=1)
    """share of an SFT batch that is drawn from `general`"""


class Checkpoint(Section):
    every: int = Field(10, ge=0)
    """steps between checkpoints; 0 for only the last"""
    keep: int = Field(2, ge=1)
    """newest checkpoints to keep"""
    on_error: Literal["stop", "continue"] = "stop"
    """what a checkpoint that cannot be written (disk full) does to the run"""


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


class Stage(Section):
    name: str
    """of the stage, for logs and metrics"""
    until_step: int = Field(0, ge=0)
    """the stage ends with this optimiser step; 0 for no such limit"""
    until: str = ""
    """the stage ends when this holds for the mean over `over_steps` steps, e.g. "accuracy > 0.8" or "length/mean > 60"
    (any metric of a training step); "" for no such condition"""
    over_steps: int = Field(5, ge=1)
    """steps of the stage over which `until` takes its mean"""
    data: dict[str, Any] = {}
    """settings of [data] from this stage on: pass_rate, domains, drop_solved_after"""
    rollout: dict[str, Any] = {}
    """settings of [rollout] from this stage on: prompts_per_step, group_size, max_async_level, reorder_window,
    max_completion_tokens"""
    reward: dict[str, Any] = {}
    """settings of [reward] from this stage on: length, length_max, overlong_buffer, language"""
    optimiser: dict[str, Any] = {}
    """settings of [optimiser] from this stage on: minibatches, learning_rate"""


class Sync(Section):
    verify: bool = True
    """check version, checksums and log-probs of every engine after every weight update"""
    max_difference: float = Field(0.0, ge=0)
    """largest mean |log-prob difference| on the probe; 0 means 1e-4 in float32, 0.05 in float16,
    0.25 in bfloat16"""


class Deadlines(Section):
    start_s: float = Field(300, gt=0)
    """all ranks are up, models loaded"""
    heartbeat_s: float = Field(60, gt=0)
    """silence after which a rank counts as hung"""
    step_s: float = Field(3600, gt=0)
    """one accumulate or optimiser call; this and other calls and waits end sooner after ten times the longest of their
    kind so far, at least two minutes and a tenth of the setting"""
    sync_s: float = Field(120, gt=0)
    """one weight update with its proof"""
    batch_s: float = Field(7200, gt=0)
    """waiting for a full batch of groups"""
    teacher_s: float = Field(300, gt=0)
    """log-probs of one completion from a teacher behind an address, all attempts together, once it is its turn"""
    token_s: float = Field(120, gt=0)
    """an engine with running requests, no new token and no answer for this long is killed and restarted; earlier after
    ten times its longest silence so far, if that is at least a quarter of this"""


class Prepare(Section):
    script: str = ""
    """Python file with a function prepare(folder, options, seed), run once, before anything is read, to write files
    into the folder made/ of the run; there lie model.path and the files of [data] and [sft] that begin with
    made/. "" for none"""
    options: dict[str, Any] = {}
    """what the script is told; it checks them itself"""


class Config(Section):
    name: str = "run"
    """the run's folder is runs_dir/name"""
    runs_dir: str = "runs"
    """parent of run folders"""
    seed: int = 0
    """seeds of data order, sampling and initial weights derive from this"""
    mode: Literal["rl", "sft"] = "rl"
    """"rl": SFT, if any, then reinforcement learning; "sft": only the SFT steps of [sft],
    evaluated on the way"""
    steps: int = Field(60, ge=0)
    """policy versions of reinforcement learning: batches trained, each with optimiser.minibatches optimiser steps"""
    model: Model = Model()
    data: Data = Data()
    placement: Placement = Placement()
    rollout: Rollout = Rollout()
    reward: RewardWeights = RewardWeights()
    objective: dict[str, Any] = {}
    """settings of the objective, which reads and checks them itself (trainer/objectives); docs/objectives.md"""
    optimiser: Optimiser = Optimiser()
    sft: Sft = Sft()
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    sync: Sync = Sync()
    deadlines: Deadlines = Deadlines()
    prepare: Prepare = Prepare()
    stages: list[Stage] = []
    """[[stages]]: parts of the run with settings of their own; none for a run of one stage"""

    @model_validator(mode="after")
    def refuse_contradictions(self) -> Config:
        """Raise ValueError with every contradiction, one line each."""
        if found := list(contradictions(self)):
            raise ValueError("\n".join(found))
        return self

    def at_stage(self, number: int) -> Config:
        """The settings in force in stage `number` (0-based): those of the file, changed by the stages up to it."""
        table = self.model_dump()
        for stage in self.stages[: number + 1]:
            for section in STAGED:
                table[section] |= getattr(stage, section)
        return Config.model_validate({**table, "stages": []})

    @property
    def every_stage(self) -> list[Config]:
        """The settings in force in each stage; those of the file where there are none."""
        return [self.at_stage(number) for number in range(len(self.stages))] or [self]

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.runs_dir) / self.name

    def locate(self, path: str) -> str:
        """The path that a setting names: one that begins with made/ lies in the run's folder."""
        return str(self.run_dir / path) if path.startswith("made/") else path

    @property
    def last_version(self) -> int:
        """Policy version at the end of the run."""
        return self.sft.steps if self.mode == "sft" else self.steps

    @property
    def world_size(self) -> int:
        """Ranks of the launch: controller, trainers, engines."""
        return 1 + self.placement.trainers + self.placement.engines

    @property
    def window(self) -> int:
        """Take-window in groups."""
        return self.rollout.reorder_window or self.rollout.prompts_per_step

    @property
    def max_staleness(self) -> int:
        """Bound of a trained token's age in versions: async_level + ceil((window - 1) / prompts_per_step); async_level
        if fixed."""
        if self.rollout.fixed_staleness:
            return self.rollout.max_async_level
        return (
            self.rollout.max_async_level + -(-(self.window - 1) // self.rollout.prompts_per_step)
            if self.rollout.max_async_level
            else 0
        )
