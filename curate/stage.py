'''A stage of curation: its options, which are the fields of a pydantic dataclass, and what it decides about a row.

    @dataclass
    class LengthStage(CurationStage):
        """Keep short problems.

        The first line is in the list of stages, the whole docstring in --help.
        """

        name = "length"
        most: int = Field(default=500, ge=1, description="characters of a problem, at most")

        async def decide(self, index, row): ...  # -> Kept([row.fields]) or Rejected("too long", "731 characters")

A decision must depend on the rows and the settings alone: a resumed stage decides only about the missing rows.
'''

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_origin

import msgspec
from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from shared.errors import ConfigError
from shared.jsonl import Row
from shared.settings_file import meaning, plain, type_name
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
    """Counts for the report, as in `Kept`."""


Decision = Kept | Rejected


Share = Annotated[float, Field(gt=0, le=1)]
Rate = Annotated[float, Field(ge=0, le=1)]


@dataclass(config=ConfigDict(allow_inf_nan=False))
class CurationStage:
    """A command that sees all rows once, then keeps, changes or rejects each. Its fields are its options. A field with
    `exclude` changes no decision: journal and report do not name it."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        self.decisions: list[Decision] = []
        """for a stage that decides about all rows in `prepare`"""

    @classmethod
    def options(cls) -> dict[str, FieldInfo]:
        """Name -> field of each option."""
        fields: dict[str, FieldInfo] = getattr(cls, "__pydantic_fields__")  # noqa: B009 - mypy does not know it
        return fields

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add an option for each field. Values stay texts, which `of` reads."""
        for name, field in cls.options().items():
            kind, default = plain(field.annotation), field.get_default(call_default_factory=True)
            notes = [type_name(field)] if kind in (int, float) or get_origin(kind) is Literal else []
            if not field.is_required() and kind is not bool and default not in (None, "", []):
                shown = " ".join(default) if isinstance(default, list) else f"{default:g}" if kind is float else default
                notes.append(f"default {shown}")
            words = f"{meaning(field)} ({'; '.join(notes)})" if notes else meaning(field)
            many: dict[str, Any] = {"nargs": "+"} if get_origin(kind) is list else {}
            parser.add_argument(
                f"--{name.replace('_', '-')}", help=words.replace("%", "%%"), required=field.is_required(),
                default=argparse.SUPPRESS, **({"action": argparse.BooleanOptionalAction} if kind is bool else many),
            )  # fmt: skip

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Make the stage from options, values or texts; others are ignored. Raises InputError, a line per mistake."""
        try:
            return cls(**{name: options[name] for name in cls.options() if name in options})
        except ValidationError as error:
            lines = []
            for mistake in error.errors():
                flag, why = str(mistake["loc"][0]).replace("_", "-"), mistake["msg"].removeprefix("Value error, ")
                lines.append(f"--{flag} = {mistake['input']}: {why.replace('Input should be', 'must be')}")
            raise ConfigError("\n".join(lines)) from error

    @property
    def concurrency(self) -> int:
        """Number of rows that are decided at once."""
        return 1

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that may change a decision, as JSON; no worker counts, keys or full paths.

        Raises ConfigError for a file that cannot be read.
        """
        return {name: as_setting(getattr(self, name)) for name, field in self.options().items() if not field.exclude}

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


@dataclass
class VerifyingStage(CurationStage):
    """A stage that compares answers by meaning, in processes that start with the first comparison."""

    workers: int = Field(default=0, kw_only=True, exclude=True, description="verifier processes; 0: one per core")

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
