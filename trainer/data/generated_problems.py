"""Problems that reasoning-gym generates: `data.train = "reasoning_gym:countdown,chain_sum/2"`.

A name is one of its kinds, or a kind and a level of its curriculum (0 is the easiest); it becomes the domain of the
rows, so that tables show each apart and a stage takes others with data.domains. `data.generate` holds the options of a
kind: the fields of its configuration, and `size`, the number of problems. The rows are written once into the folder
generated/ of the run, in a process of its own, since reasoning-gym is large; no problem is among them twice, and none
of those to train on among those to validate on.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from shared.config import Config
from shared.errors import ConfigError
from shared.json_reader import parse_json
from trainer.data.row_process import rows_of_process, send_rows, write_rows
from verify.code.sandbox import codec
from verify.verifiers import REASONING_GYM
from verify.verifiers.reasoning_gym import check_installed

SIZE = 500
TRIES = 3
"""so many times the wanted number of problems are generated at most, since some are generated again"""


class Wanted(msgspec.Struct):
    """What the process is to generate."""

    setting: str
    names: list[str]
    """names of kinds, with "/LEVEL" where a level is given"""
    options: dict[str, dict[str, Any]]
    """kind -> fields of its configuration, and `size`"""
    seed: int
    size: int
    """problems of a kind whose options give no `size`"""
    seen: str = ""
    """file of problems that are left out"""


def generate(config: Config, setting: str, value: str) -> Path:
    """Return the file with the problems of a setting, "data.train" or "data.validation", made where it is not there.

    Raises ConfigError for kinds, levels and options that reasoning-gym does not have, DataError where it fails.
    """
    path = Path(config.locate(value, setting))
    if path.is_file():
        return path
    check_installed()
    names = [name.strip() for name in value.removeprefix(REASONING_GYM).split(",")]
    size, seen = SIZE, ""
    options = config.data.generate
    if setting == "data.validation":
        size, seen = -(-config.evaluate.problems // len(names)), config.locate(config.data.train)
        options = {kind: {**given, "size": size} for kind, given in options.items()}
        seen = seen if Path(seen).is_file() and config.data.train.startswith(REASONING_GYM) else ""
    for kind in options:
        if kind not in {name.partition("/")[0] for name in names} and setting == "data.train":
            raise ConfigError(f"data.generate.{kind} has no effect: name it in data.train, or remove it")
    request = Wanted(setting, names, options, config.seed, size, seen)
    argument = msgspec.json.encode(request).decode()
    write_rows(path, rows_of_process("trainer.data.generated_problems", argument, setting, config.deadlines.start_s))
    return path


# ---- in the process ------------------------------------------------------------------------------------------------


def dataset_of(name: str, given: Mapping[str, Any], seed: int) -> Any:
    """Return reasoning-gym's generator of a kind, at a level where the name says one. Raises ConfigError."""
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum

    kind, _, level = name.partition("/")
    if kind not in DATASETS or kind == "composite":
        near = difflib.get_close_matches(kind, DATASETS, n=1, cutoff=0)[0]
        raise ConfigError(
            f"reasoning-gym has no problems '{kind}': is '{near}' meant? It has {', '.join(sorted(DATASETS))}"
        )
    made, configuration = DATASETS[kind]
    fields = {field.name for field in dataclasses.fields(configuration)} - {"seed"}
    for option in given:
        if option not in fields:
            raise ConfigError(
                f"data.generate.{kind}.{option}: there is no such option; it has {', '.join(sorted(fields))}"
            )
    try:
        if level:
            if kind not in CURRICULA:
                raise ConfigError(f"'{name}': reasoning-gym has no levels of {kind}: leave out /{level}")
            curriculum = create_curriculum(kind)
            most = max(len(one.levels) for one in curriculum.attributes.values()) - 1
            if not level.isdecimal() or int(level) > most:
                raise ConfigError(f"'{name}': the levels of {kind} are 0 to {most}")
            curriculum.set_global_level(int(level))
            chosen = dataclasses.replace(curriculum.generate_configuration(), seed=seed, **given)
        else:
            chosen = configuration(seed=seed, **given)
        return made(config=chosen)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"data.generate.{kind} = {dict(given)}: {error or type(error).__name__}") from error


def rows(request: Wanted) -> Iterator[dict[str, Any]]:
    """Yield the rows. Raises ConfigError before the first one where a kind cannot be had."""
    from importlib.metadata import version

    seen = set[str]()
    if request.seen:
        with open(request.seen, "rb") as stream:
            seen = {parse_json(line)["problem"] for line in stream}
    made, source = [], f"reasoning-gym {version('reasoning-gym')}"
    for name in request.names:
        kind = name.partition("/")[0]
        size = request.options.get(kind, {}).get("size", request.size)
        text = f"{request.seed} {request.setting} {name}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1
        made.append((name, size, dataset_of(name, request.options.get(kind, {}) | {"size": TRIES * size}, seed)))
    for name, size, dataset in made:
        count = 0
        for index in range(TRIES * size):
            item = dataset[index]
            if item["question"] in seen:
                continue
            seen.add(item["question"])
            metadata = _builtin(item["metadata"] | {"difficulty": _plain(item["metadata"].get("difficulty"))})
            plain = _plain(metadata)
            yield {
                "id": f"{name}-{index}", "problem": item["question"], "answer": item["answer"],
                "tests": plain if plain == metadata else codec.encode(metadata), "domain": name,
                "checker": REASONING_GYM + name.partition("/")[0], "source": source,
            }  # fmt: skip
            count += 1
            if count == size:
                break


def _builtin(value: Any) -> Any:
    """The same with Python's own numbers and texts in the place of NumPy's."""
    if isinstance(value, dict):
        return {_builtin(key): _builtin(one) for key, one in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_builtin, value))
    return value.tolist() if hasattr(value, "tolist") else value


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def main(text: str) -> int:
    """Entry point of the process."""
    try:
        send_rows(rows(msgspec.json.decode(text, type=Wanted)))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
