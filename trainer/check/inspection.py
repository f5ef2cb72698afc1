"""What `check` and `--dry-run` read: the chat template and all data, every row, by the functions with which a launch
reads them (run_data.py).

Nothing is left over: rows that a launch would generate or fetch are in a temporary folder meanwhile. What is not
there yet, since prepare.script or the Hub gives it at the start of a launch, is named as not read.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from shared.chat import Chat
from shared.config import Config
from shared.errors import MaestraleError, NotInstalled
from shared.model import hf
from shared.progress import Progress
from trainer.check.finding import CheckFinding
from trainer.data.data_source import chosen, opened
from trainer.data.environment_rows import EnvironmentRow, environment_rows, look_up
from trainer.data.offline import read_offline
from trainer.data.problem_file import ProblemFile, check_answers
from trainer.data.row_process import NoRowCame
from trainer.data.run_data import RunData, read_files
from trainer.data.sources import Sources, check_script, data_file, data_settings, offline_files
from trainer.stages import Stages
from verify.answer_checker import AnswerChecker
from verify.chosen_rewards import endpoints

HUB_S = 10.0
"""for one question to the Hub"""
ROW_S = 60.0
"""for a row of a data set that is fetched or generated; a launch waits for deadlines.start_s"""
LARGE = 32 << 20
"""bytes of data from which a note says that they are being read"""
DATA_STEP = "correct the path, the rows or the setting that it names; paths start at the working directory"
TOKENIZER = ["*.json", "*.jinja", "*.txt", "tokenizer*"]


@dataclass
class Inspected:
    """The template, or one kind of data, as it was read."""

    name: str
    texts: list[str] = field(default_factory=list)
    """lines about the data that was read, and the data that is made at the start"""
    warnings: list[str] = field(default_factory=list)
    error: MaestraleError | None = None
    """the reason why a launch would be refused"""


@dataclass
class Inspection:
    """Everything that was read."""

    results: dict[str, Inspected] = field(default_factory=dict)
    environments: list[EnvironmentRow] = field(default_factory=list)
    added: dict[str, int] = field(default_factory=dict)
    """of `Episodes`"""
    refused: list[Inspected] = field(default_factory=list)
    """the results with an error, in the order in which a launch meets them"""

    @contextmanager
    def reading(self, name: str) -> Iterator[Inspected]:
        """The result with this name; errors in the block become its error."""
        result = self.results.setdefault(name, Inspected(name))
        try:
            yield result
        except MaestraleError as error:
            if result.error is None:
                result.error = error
                self.refused.append(result)

    def raise_first(self) -> None:
        """Raise the first error."""
        for result in self.refused:
            assert result.error is not None
            raise result.error


class Notes(Progress):
    """Keeps what a launch would print while it reads, for a report."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.result = Inspected("")

    def note(self, text: str) -> None:
        """Keep something worth knowing."""
        self.result.texts.append(text)

    def warning(self, text: str) -> None:
        """Keep something that may need a repair."""
        self.result.warnings.append(text)


def inspect(config: Config) -> Inspection:
    """Read everything that a launch with these settings would read."""
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        return asyncio.run(Inspector(config, folder).read())


class Inspector:
    """Reads what the settings name. Errors are kept with what they are of, so that all are reported."""

    def __init__(self, config: Config, folder: str):
        """folder: for rows that a launch would generate or fetch."""
        waits = config.deadlines.model_copy(update={"start_s": min(ROW_S, config.deadlines.start_s)})
        self.config = config
        self.elsewhere = config.model_copy(update={"runs_dir": folder, "deadlines": waits})
        self.found, self.progress = Inspection(), Notes()
        self.made = f"is made at the start by {config.prepare.script}" if config.prepare.script else ""
        if (config.run_dir / "made").is_dir():
            self.made = ""

    async def read(self) -> Inspection:
        """Read the files, then what needs the model too."""
        config, settings = self.config, data_settings(self.config)
        with self.found.reading("data"):
            check_script(config)
        generated = {key: Path(config.locate(value, key)) for key, value in settings.items()
                     if not value.startswith("made/") and config.locate(value, key) != value}  # fmt: skip
        kept = all(path.is_file() for path in generated.values())
        paths = {key: self._file(key, value, key in generated and not kept) for key, value in settings.items()}
        chat, offline, files = self._chat(), self._offline(), list[ProblemFile]()
        if sum(path.stat().st_size for path in (*paths.values(), *offline) if path) > LARGE:
            self.progress.phase("reading the data")
        with self.found.reading("data") as result:
            files = await asyncio.to_thread(read_files, config, paths["data.train"], paths["data.validation"])
            result.texts += [f"{file.setting}: {len(file.problems):,} problems of {file.path}" for file in files]
        self.found.environments = environment_rows(files)
        if chat is None:
            await self._without_model(files, paths)
        else:
            demonstrations = paths["sft.demonstrations"], paths["sft.general"]
            await self._with_model(chat, Sources(chat.folder, Path(), None, *demonstrations, offline), files)
        for key, value in settings.items():
            self._rename(str(paths[key]), value)
        return self.found

    def _file(self, key: str, value: str, elsewhere: bool) -> Path | None:
        name = "data" if key.startswith("data.") else "SFT"
        with self.found.reading(name) as result:
            if self.made and value.startswith("made/"):
                result.texts.append(f"{key} = {value} {self.made} and was not read")
                return None
            try:
                return data_file(self.elsewhere if elsewhere else self.config, key, value)
            except NoRowCame:
                result.warnings.append(f"{key} = {value}: no row came for {ROW_S:g} s, so it was not read")
        return None

    def _offline(self) -> tuple[Path, ...]:
        if self.made and self.config.data.offline.startswith("made/"):
            with self.found.reading("data.offline") as result:
                result.texts.append(f"{self.config.data.offline} {self.made} and was not read")
        elif self.config.data.offline:
            with self.found.reading("data.offline"):
                return offline_files(self.config)
        return ()

    def _chat(self) -> Chat | None:
        """The chat of the model where its folder is there or the Hub gives its tokenizer."""
        path, folder = self.config.model.path, Path(self.config.locate(self.config.model.path))
        with self.found.reading("template") as result:
            if self.made and path.startswith("made/"):
                result.texts.append(f"{path} {self.made}: what needs its tokenizer was not read")
                return None
            if not folder.is_dir():
                if not hf.may_be_hub_id(path):
                    hf.resolve(str(folder))  # which raises, since it is no name of the Hub either
                from huggingface_hub import snapshot_download

                try:
                    folder = Path(snapshot_download(path, allow_patterns=TOKENIZER, etag_timeout=HUB_S))
                except Exception as error:  # noqa: BLE001 - the hub's client raises errors of several libraries
                    why = f"the Hub did not give it ({type(error).__name__})"
                    result.warnings.append(f"the tokenizer of {path} was not read: {why}")
                    return None
            chat = Chat.of_run(folder, self.config)
            result.texts.append(chat.describe())
            result.warnings += chat.warnings
            return chat

    async def _without_model(self, files: list[ProblemFile], paths: dict[str, Path | None]) -> None:
        """What a launch reads of the problems without a tokenizer."""
        config, settings = self.config, Stages(self.config).now.data
        with self.found.reading("environments"):
            await look_up(config, self.found.environments)
        with self.found.reading("data") as result:
            checker = AnswerChecker(workers=config.reward.workers, deadline_s=config.reward.deadline_s)
            await checker.start()
            try:
                for file in files:
                    problems = opened(file.problems, config.data.open_share)
                    trained = file.setting == "data.train"
                    await check_answers(file, chosen(problems, settings) if trained else problems, checker, config)
                    result.warnings += file.warnings
            finally:
                await checker.close()
        for key in ("sft.demonstrations", "sft.general"):
            if paths[key] is not None:
                with self.found.reading("SFT") as result:
                    result.texts.append(f"{key} = {paths[key]} was not read, since the tokenizer is not here")

    async def _with_model(self, chat: Chat, sources: Sources, files: list[ProblemFile]) -> None:
        config = self.config
        data = RunData(config, Stages(config), sources, chat, files, self.progress)
        try:
            with self.found.reading("data") as self.progress.result:
                await data.start()
            for name, read in data.steps():
                with self.found.reading(name) as self.progress.result:
                    if name == "environments" and not files:
                        await look_up(config, [])
                    elif name == "data.offline" and sources.offline and endpoints(config.reward):
                        await asyncio.to_thread(read_offline, sources.offline, data.prompts, config)
                        self.progress.note("its rows are read, and not scored: that would ask the judges")
                    else:
                        await read()
        finally:
            await data.close()
            self.found.added = data.episodes.added
        if (demonstrations := data.demonstrations) is not None:
            counts = f"{len(demonstrations.reasoning):,} of {sources.demonstrations}"
            counts += f", {len(demonstrations.general):,} of {sources.general}" if sources.general else ""
            self.found.results["SFT"].texts.append(counts)

    def _rename(self, path: str, value: str) -> None:
        """Name a setting's value in the place of its file in the temporary folder."""
        for result in self.found.results.values() if path.startswith(self.elsewhere.runs_dir) else ():
            result.texts = [text.replace(path, value) for text in result.texts]
            result.warnings = [text.replace(path, value) for text in result.warnings]
            if result.error is not None:
                result.error = type(result.error)(str(result.error).replace(path, value))


def findings_of(result: Inspected) -> Iterator[CheckFinding]:
    """Yield a line for an error and for each warning about one kind of data, else one that says what was read."""
    if result.error is not None:
        step = DATA_STEP if not isinstance(result.error, NotInstalled) else f"run {result.error.command}"
        yield CheckFinding(result.name, "FAIL", str(result.error), step)
    elif result.texts:
        yield CheckFinding(result.name, "OK", "; ".join(result.texts))
    for warning in result.warnings:
        yield CheckFinding(result.name, "WARN", warning, "repair it, or let it be where it is meant")
