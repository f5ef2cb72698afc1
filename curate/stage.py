'''A stage of curation: its options, which are the fields of a dataclass, and what it decides about a row.

    @dataclass
    class LengthStage(CurationStage):
        """Keep short problems.

        The first line stands in the list of stages, the whole docstring in --help.
        """

        name = "length"
        most: int = option(500, "characters of a problem, at most (default 500)", at_least(1))

        async def decide(self, index, row): ...  # -> Kept([row.fields]) or Rejected("too long", "731 characters")

A decision must depend on the rows and the settings alone: a resumed stage decides only about the missing rows.
'''

from __future__ import annotations

import argparse
import hashlib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import msgspec

from shared.errors import ConfigError
from shared.jsonl import Row
from shared.types import Verdict
from verify.answer_checker import AnswerChecker, worker_count
from verify.verifiers import verifier_of

Fields = dict[str, Any]
"""a row as decoded from JSON"""
Show = Callable[[int, int], Awaitable[None]]
"""await show(done, total): moves the bar of a long `prepare`, and lets Ctrl-C through"""


class Kept(msgspec.Struct, frozen=True):
    """The output rows of an input row: none, itself (perhaps changed), or several."""

    rows: list[Fields]
    counts: dict[str, int] = {}
    """counts of what happened to the row, added up for the report, e.g. {"tests dropped": 2}"""


class Rejected(msgspec.Struct, frozen=True):
    """The decision to leave a row out, with the reason."""

    reason: str
    """a few words, the same for all rows of the kind, which are counted by it"""
    detail: str = ""
    """details of this row, in one line"""
    counts: dict[str, int] = {}
    """as of `Kept`"""


Decision = Kept | Rejected


class Bound(NamedTuple):
    """The values that an option may have."""

    words: str
    holds: Callable[[Any], bool]


def at_least(least: int) -> Bound:
    """Return the bound of a count."""
    return Bound(f"at least {least}", lambda value: bool(value >= least))


POSITIVE = Bound("above 0", lambda value: bool(value > 0))
SHARE = Bound("above 0 and at most 1", lambda value: 0 < value <= 1)
RATE = Bound("between 0 and 1", lambda value: 0 <= value <= 1)


def option(
    default: Any, text: str, bound: Bound | None = None, *, setting: bool = True, flag: str = "", **argument: Any
) -> Any:
    """Declare an option as a field of a dataclass; `default`: dataclasses.MISSING for one that must be given.

    text, argument: for argparse; a number's type and metavar come from its default. setting: whether a decision can
    depend on it, so that the journal and the report name it. flag: its name, where that is not the field's.
    """
    metadata = {"text": text, "bound": bound, "setting": setting, "flag": flag, "argument": argument}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class CurationStage:
    """A command that sees all rows once, then keeps, changes or rejects each. Raises ConfigError if an option is out of
    its bound."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        self.decisions: list[Decision] = []
        """for a stage that decides about all rows in `prepare`"""
        for option_ in fields(self):
            value, bound = getattr(self, option_.name), option_.metadata["bound"]
            if bound is not None and not bound.holds(value):
                raise ConfigError(f"--{option_.name.replace('_', '-')} = {value}: must be {bound.words}")

    @classmethod
    def explanation(cls) -> tuple[str, str]:
        """Return the first line of the docstring, for the list of commands, and the rest, for --help."""
        summary, _, rest = inspect.cleandoc(cls.__doc__ or "").partition("\n")
        return summary, rest.strip()

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add an option for each field."""
        for one in sorted(fields(cls), key=lambda one: bool(one.kw_only)):
            default = one.default if one.default_factory is MISSING else one.default_factory()
            argument = {"help": one.metadata["text"], "dest": one.name, **one.metadata["argument"]}
            argument |= {"required": True} if default is MISSING else {"default": default}
            if isinstance(default, int | float) and "action" not in argument:
                argument = {"type": type(default), "metavar": "N" if isinstance(default, int) else "X"} | argument
            parser.add_argument(one.metadata["flag"] or f"--{one.name.replace('_', '-')}", **argument)

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Self:
        """Make the command from parsed options. Raises InputError."""
        return cls(**{one.name: getattr(options, one.name) for one in fields(cls)})

    @property
    def concurrency(self) -> int:
        """Number of rows that are decided at once."""
        return 1

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that may change a decision, as JSON; no worker counts, keys or full paths.

        Raises ConfigError for a file that cannot be read.
        """
        return {one.name: as_setting(getattr(self, one.name)) for one in fields(self) if one.metadata["setting"]}

    def find(self, inputs: Sequence[Path]) -> list[Path]:
        """Return the files of the given inputs. Raises InputError."""
        return list(inputs)

    async def prepare(self, rows: Sequence[Row], show: Show) -> None:
        """See all rows before the first is decided, again after a resume. Raises DataError for one it cannot take."""

    async def decide(self, index: int, row: Row) -> Decision:
        """Decide about one row; `index` is its position over all input files, from 0."""
        return self.decisions[index]

    async def close(self) -> None:
        """Stop processes and close connections; called once, also after an error or Ctrl-C."""


@dataclass(kw_only=True)
class VerifyingStage(CurationStage):
    """A stage that compares answers by meaning, in processes that start with the first comparison."""

    workers: int = option(0, "verifier processes (default: one per core)", setting=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.checker = AnswerChecker(workers=worker_count(self.workers))

    async def compare(self, ground_truth: str, answer: str) -> Verdict:
        """Grade an answer against another."""
        await self.checker.start()
        return await self.checker.check(ground_truth, answer)

    async def close(self) -> None:
        """Stop the verifiers."""
        await self.checker.close()


def digest(path: Path) -> str:
    """Return a digest of a file's bytes, 16 hexadecimal digits. Raises ConfigError if it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): give an existing .jsonl or .jsonl.gz") from error


def as_setting(value: Any) -> Any:
    """Return an option's value as JSON: the digest of a file, names and digests of several, "" for none."""
    if isinstance(value, Path):
        return digest(value)
    if isinstance(value, list) and any(isinstance(path, Path) for path in value):
        return [{"file": path.name, "digest": digest(path)} for path in value]
    return "" if value is None else value


def is_open(row: Mapping[str, Any]) -> bool:
    """Whether the row is an open problem, whose answer is learned from but not compared (`Problem.verified`)."""
    return not verifier_of(row.get("domain")).verifies


def random_order(name: str, seed: int) -> bytes:
    """Return the pseudo-random number of a name, 16 bytes, the same on every machine: names sorted by it are mixed."""
    return hashlib.blake2b(f"{seed}\0{name}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
