"""Problems from a JSONL file, drawn in an order that is a pure function of (seed, index).

The draw at `index` of a stage is the same whoever asks and whenever: the cursor is one number (the ledger's
`next_index`), so a resumed run neither repeats nor skips. Each epoch has its own permutation.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Collection, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import msgspec

from shared.atomic_write import beside
from shared.chat import AnswerFormat, Chat, joined, system_prompt
from shared.errors import DataError
from shared.languages import with_request
from shared.quoted_texts import QuotedTexts
from shared.sections import Data
from shared.types import Problem, Prompt
from trainer.data.written_text import WrittenTexts
from trainer.stages import Stages
from verify.verifiers import verifier_for, verifier_of


def opened(problems: Sequence[Problem], share: float) -> list[Problem]:
    """The same problems; `share` of the answers that a verifier compares, evenly spread, are hidden."""
    copies, answers = [], 0
    for problem in problems:
        if problem.tests is None and problem.verified:
            answers += 1
            if int(answers * share) > int((answers - 1) * share):
                problem = msgspec.structs.replace(problem, hidden=True)
        copies.append(problem)
    return copies


def chosen(problems: Sequence[Problem], data: Data, retired: Collection[str] = ()) -> list[Problem]:
    """Problems of data.domains and data.pass_rate that are not retired, by id. Raises DataError for none."""
    least, most = data.pass_rate
    kept = [
        problem
        for problem in problems
        if problem.id not in retired
        and (not data.domains or problem.domain in data.domains)
        and (problem.pass_rate is None or least <= problem.pass_rate <= most)
    ]
    if not kept:
        raise DataError(
            f"none of the {len(problems)} problems in data.train is of data.domains = {data.domains} with "
            f"data.pass_rate = {list(data.pass_rate)} and not solved ({len(retired)} are): widen these settings, "
            "or give more problems"
        )
    return kept


FITTING_IN_A_ROW = 200
TRIES = 10_000
"""draws of one prioritised problem, after which the last is taken: nearly all problems are solved"""
PROBE_TOKENS = 8, 64, 256
"""lengths of the probe's sequences, where model.max_tokens has room for them"""


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, count: int) -> list[int]:
    """The order of `count` rows in an epoch."""
    order = list(range(count))
    random.Random(f"order {seed} {epoch}").shuffle(order)
    return order


def completion_seed(run_seed: int, index: int, sample: int) -> int:
    """Sampling seed of one completion: a function of (run, prompt, sample), never of the engine; [0, 2**62)."""
    digest = hashlib.blake2b(f"{run_seed}/{index}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


class PromptFormat:
    """Renders the text of a problem as a prompt: template of its domain, system prompt, chat format."""

    def __init__(self, chat: Chat, settings: Data):
        self.chat, self.settings = chat, settings

    def without_system(self) -> PromptFormat:
        """The same chat format, with neither system prompt nor template: for general instructions."""
        return PromptFormat(self.chat, self.settings.model_copy(update={"system_prompt": "", "templates": {}}))

    def render(
        self, text: str, domain: str = "math", also: Sequence[str] = (), form: AnswerFormat | None = None,
        language: str = "",
    ) -> list[int]:  # fmt: skip
        """[prompt_tokens] token ids of one user turn; what `text` and `also` spell is never a control token, as in
        serving. also: texts after the system prompt, such as tools. form: of the answer, None for that of the domain.
        language: in which the turn asks to reason, as a server does, "" for none."""
        quoted, template = QuotedTexts(self.chat), self.settings.templates.get(domain, "{problem}")
        system = system_prompt(self.settings.system_prompt, form or verifier_of(domain).form, language)
        question = with_request(template.replace("{problem}", quoted.quote(text)), language)
        texts = [also] if isinstance(also, str) else also
        return self.chat.render(question, joined(system, *map(quoted.quote_system, texts)), quoted)

    def prompt_of(self, problem: Problem, text: str = "", also: Sequence[str] = ()) -> list[int]:
        """[prompt_tokens] token ids of a problem, after them its prefix, of which the tags of the reasoning alone are
        control tokens; `text`, where given, takes the place of its own."""
        form, language = verifier_for(problem).form, problem.reasoning_language
        ids = self.render(text or problem.text, problem.domain, also, form, language)
        return ids + self._written.encode(problem.prefix) if problem.prefix else ids

    @cached_property
    def _written(self) -> WrittenTexts:
        return WrittenTexts(self.chat)


class DataSource:
    """Draws prompts by index and renders them; the stage determines which problems are drawn."""

    def __init__(self, problems: list[Problem], stages: Stages, prompt_format: PromptFormat):
        self.all, self.stages, self.prompt_format = problems, stages, prompt_format
        self.seed = stages.config.seed
        self.long: dict[str, int] = {}
        """problem id -> lower bound of the tokens of its prompt, for those that `measure` found to be too long"""
        self._chosen: tuple[Data, list[Problem]] | None = None

    @cached_property
    def vocabulary(self) -> int:
        """Number of tokens in the vocabulary."""
        return len(self.prompt_format.chat.tokenizer)

    @property
    def problems(self) -> list[Problem]:
        """The problems of the stage, as `chosen`. Raises DataError when none is left."""
        if self._chosen is None or self._chosen[0] is not self.stages.now.data:
            self._chosen = self.stages.now.data, chosen(self.all, self.stages.now.data, set(self.stages.state.retired))
        return self._chosen[1]

    @property
    def room(self) -> int:
        """Most tokens of a prompt."""
        return self.stages.now.model.max_tokens - self.stages.now.rollout.max_completion_tokens

    @property
    def room_in_words(self) -> str:
        """Where the bound `room` comes from, and what every prompt takes of it."""
        now, around = self.stages.now, len(self.prompt_format.render(""))
        return (
            f"longer than {self.room} tokens (model.max_tokens = {now.model.max_tokens} less "
            f"rollout.max_completion_tokens = {now.rollout.max_completion_tokens}; system prompt and chat format take "
            f"{around}). Raise the first, lower the second, or shorten data.system_prompt"
        )

    def problem_at(self, index: int) -> Problem:
        """The problem of draw `index`: with i draws since the stage began and n problems, epoch i // n, position i % n
        in that epoch's order; with data.order = "prioritised" of (seed, index, what is known of successes)."""
        problems, count = self.problems, len(self.problems)
        if self.stages.now.data.order == "prioritised":
            return self._prioritised(problems, index)
        epoch, position = divmod(index - self.stages.state.first_index, count)
        shuffle = self.stages.now.data.order == "shuffle"
        return problems[permutation(self.seed, epoch, count)[position] if shuffle else position]

    def _prioritised(self, problems: Sequence[Problem], index: int) -> Problem:
        """A problem with chance proportional to 1 - success (Kimi k1.5, arXiv 2501.12599, section 2.3.4), by rejection.
        Success: share of right completions in its last group, before the first its row's pass_rate, else 0."""
        chance = random.Random(f"draw {self.seed} {index}")
        for _ in range(TRIES):
            problem = chance.choice(problems)
            if chance.random() >= self.stages.state.success.get(problem.id, problem.pass_rate or 0.0):
                break
        return problem

    def render(self, problem: Problem, index: int) -> Prompt:
        """The prompt of a problem."""
        return Prompt(index, problem, self.prompt_format.prompt_of(problem))

    def measure(self, problems: Sequence[Problem]) -> list[Problem]:
        """Problems, in their order, whose prompts leave no room for a completion. Slow, and safe in a thread.

        A text has at most as many tokens as bytes, and at least its letters divided by those of the longest token, so
        most are not rendered (a megabyte would take seconds). The others are, from the longest down, until
        FITTING_IN_A_ROW in succession fit; the shorter rest is taken to fit too (`draw` checks every prompt anyway).
        """
        forms = [(one.domain, (), verifier_for(one).form, one.reasoning_language) for one in problems]
        around = {form: len(self.prompt_format.render("", *form)) for form in set(forms)}
        sizes = [
            (len((one.text + one.prefix).encode()) + around[form], one)
            for one, form in zip(problems, forms, strict=True)
        ]
        doubtful = sorted((pair for pair in sizes if pair[0] > self.room), key=lambda pair: -pair[0])
        long, fitting, longest = set[str](), 0, self.prompt_format.chat.longest_token
        for _, problem in doubtful:
            count = len(problem.text + problem.prefix) // longest
            if count <= self.room:
                count = len(self.prompt_format.prompt_of(problem))
            fitting = 0 if count > self.room else fitting + 1
            if count > self.room:
                self.long[problem.id] = count
                long.add(problem.id)
            elif fitting >= FITTING_IN_A_ROW:
                break
        return [problem for problem in problems if problem.id in long]

    def draw(self, index: int) -> Prompt:
        """The first prompt at or after `index` that fits the model's length; longer ones are skipped."""
        for skipped in range(len(self.problems)):
            problem = self.problem_at(index + skipped)
            if self.long.get(problem.id, 0) <= self.room:
                prompt = self.render(problem, index + skipped)
                if len(prompt.token_ids) <= self.room:
                    return prompt
        raise DataError(f"every problem is {self.room_in_words}")

    def draw_many(self, index: int, count: int) -> list[Prompt]:
        """The next `count` prompts from `index` on."""
        prompts: list[Prompt] = []
        for _ in range(count):
            prompts.append(self.draw(prompts[-1].index + 1 if prompts else index))
        return prompts

    def probe(self) -> list[list[int]]:
        """[sequences][tokens] fixed sequences that trainers and engines score after weight updates, to prove that
        both hold the same model: ends of problems with their answers, each of another length and problem."""
        sequences: list[list[int]] = []
        longest = min(PROBE_TOKENS[-1], self.stages.now.model.max_tokens - 1)
        problems = itertools.cycle(self.all)
        for count in sorted({max(2, tokens * longest // PROBE_TOKENS[-1]) for tokens in PROBE_TOKENS}):
            ids: list[int] = []
            while len(ids) < count:
                problem = next(problems)
                answer = self.prompt_format.chat.encode_plain(problem.answer or problem.text)
                ids += self.render(problem, 0).token_ids + answer
            sequences.append(ids[-count:])
        return sequences

    def seeds(self, prompt: Prompt) -> list[int]:
        """[group_size] sampling seeds of a prompt's completions."""
        size = self.stages.now.rollout.group_size
        return [completion_seed(self.seed, prompt.index, sample) for sample in range(size)]


def write_jsonl(path: Path, rows: list[msgspec.Struct]) -> None:
    """Write records, one JSON object a line, to a partial file next to `path` that is then renamed."""
    with beside(path) as partial, partial.open("wb") as stream:
        for row in rows:
            stream.write(msgspec.json.encode(row) + b"\n")
