"""Data sets that are no JSON lines: `data.train = "hub:openai/gsm8k/main:train"`, or a .parquet file.

The library datasets reads them, in a process of its own, since it is large. The rows are written once into the folder
generated/ of the run and read from there, so that errors name their lines and a resumed run goes on with the same.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.config import Config
from shared.errors import ConfigError, DataError, NotInstalled
from shared.user_file import missing
from trainer.data.row_process import rows_of_process, send_rows, write_rows

HUB, PARQUET = "hub:", ".parquet"
PROBE_S = 5.0
"""in this time the Hub must answer a first question"""
OFFLINE = (
    ". Without a network: name a .parquet or .jsonl file in its place, or load the set where there is one and copy its "
    "cache here (~/.cache/huggingface, or where HF_HOME says)"
)


def fetch(config: Config, setting: str, value: str) -> Path:
    """Return the file with the rows of a data set that a setting names. Raises as `fetch_to`."""
    return fetch_to(Path(config.locate(value, setting)), setting, value, config.deadlines.start_s)


def fetch_to(path: Path, setting: str, value: str, deadline_s: float) -> Path:
    """Return the path, with the rows of a data set written there where it is no file. deadline_s: for each row. Raises
    ConfigError for one that is not named right and where the library is missing, DataError where it cannot be had."""
    if path.is_file():
        return path
    name = value.removeprefix(HUB).partition(":")[0]
    if value.startswith(HUB) and (name.count("/") not in (1, 2) or not all(name.split("/"))):
        raise ConfigError(f"{setting} = '{value}': write hub:OWNER/NAME, hub:OWNER/NAME/CONFIG, or these and :SPLIT")
    if not value.startswith(HUB) and not Path(value).is_file():
        raise DataError(f"{setting} = '{value}': {missing(Path(value))}")
    if importlib.util.find_spec("datasets") is None:
        raise NotInstalled("datasets", f"{setting} = '{value}': ")
    write_rows(path, rows_of_process("trainer.data.data_sets", value, setting, deadline_s))
    return path


# ---- in the process ------------------------------------------------------------------------------------------------


def rows(value: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set, without cells that are empty. No code of a data set is run."""
    if value.startswith(HUB):
        reach_hub()
    from datasets import load_dataset

    if value.startswith(HUB):
        name, _, split = value.removeprefix(HUB).partition(":")
        owner, name, *subset = name.split("/")
        data_set = load_dataset(f"{owner}/{name}", *subset, split=split or "train")
    else:
        data_set = load_dataset("parquet", data_files=value, split="train", streaming=True)
    for row in data_set:
        yield {key: cell for key, cell in row.items() if cell is not None}


def reach_hub() -> None:
    """Where the Hub does not answer, look into the cache of data sets at once: the library would try for minutes."""
    from huggingface_hub import constants, get_session

    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=PROBE_S)
        except Exception:  # noqa: BLE001 - of the network, by whichever library the client has
            os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE = "1", True


def main(value: str) -> int:
    """Entry point of the process."""
    try:
        send_rows(rows(value))
    except Exception as error:  # noqa: BLE001 - that of the library, of pyarrow or of a network
        reason = " ".join(str(error).split())[:400] or "no reason given"
        offline = OFFLINE if value.startswith(HUB) and os.environ.get("HF_HUB_OFFLINE") else ""
        sys.stderr.write(f"'{value}' cannot be had ({type(error).__name__}: {reason}){offline}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
