"""What each tracker has of a run, read by its own reader: numbers by name and step, the last of each, and samples.

W&B has none for its offline files: they are LevelDB logs of its protocol buffers, which its own classes parse.
"""

import html
import json
from pathlib import Path
from typing import Any

Found = tuple[dict[tuple[str, int], float], list[list[str]], int]
"""numbers, [rows][columns] cells of all tables as texts, number of runs"""


def wandb_records(path: Path) -> list[Any]:
    """The records of an offline file: blocks of 32 KiB with pieces of records, the first 7 bytes are the file's."""
    from wandb.proto import wandb_internal_pb2

    data, place, part, found = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        part += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            found.append(wandb_internal_pb2.Record.FromString(part))
            part = b""
    return found


def read_wandb(folder: Path) -> Found:
    numbers: dict[tuple[str, int], float] = {}
    cells, ids = [], set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda one: one.stat().st_mtime):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            step = row.pop("step", row.pop("sft/step", None))
            numbers |= {(name, step): value for name, value in row.items() if isinstance(value, (int, float))}
        for table in sorted(path.parent.glob("files/media/table/*.json")):
            cells += json.loads(table.read_text())["data"]
    numbers = {key: value for key, value in numbers.items() if not key[0].startswith("_") and "samples" not in key[0]}
    return numbers, [[str(cell) for cell in row] for row in cells], len(ids)


def read_tensorboard(folder: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    numbers: dict[tuple[str, int], float] = {}
    cells = []
    for part in {path.parent for path in (folder / "tensorboard").rglob("events.out.*")}:
        events = EventAccumulator(str(part), size_guidance={"scalars": 0, "tensors": 0}).Reload()
        for name in events.Tags()["scalars"]:
            steps = [event.step for event in events.Scalars(name)]
            assert len(set(steps)) == len(steps), f"{name}: steps that were made again stand twice"
            numbers |= {(name, event.step): event.value for event in events.Scalars(name)}
        for event in events.Tensors("samples") if "samples" in events.Tags()["tensors"] else []:
            for line in event.tensor_proto.string_val[0].decode().splitlines()[2:]:
                row = [html.unescape(cell.strip().replace("<br>", "\n")) for cell in line.strip("|").split("|")]
                cells.append(row)
    return numbers, cells, 1


def read_trackio(folder: Path) -> Found:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = list(trackio.Api().runs("maestrale"))
    numbers: dict[tuple[str, int], float] = {}
    cells = []
    for row in SQLiteStorage.get_logs("maestrale", runs[0].name, run_id=runs[0].id):
        if "samples" in row:
            cells += [[str(cell) for cell in one.values()] for one in row["samples"]["_value"]]
        numbers |= {(name, row["step"]): value for name, value in row.items() if isinstance(value, (int, float))}
    return {key: value for key, value in numbers.items() if key[0] != "step"}, cells, len(runs)


def read_mlflow(folder: Path) -> Found:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("maestrale")
    runs = client.search_runs([experiment.experiment_id])
    number = runs[0].info.run_id
    assert runs[0].info.status == "FINISHED" and runs[0].data.params["optimiser.warmup_steps"] == "5"
    numbers = {
        (name, one.step): one.value
        for name in runs[0].data.metrics
        for one in sorted(client.get_metric_history(number, name), key=lambda one: one.timestamp)
    }
    tables = client.load_table(experiment.experiment_id, "samples/from_step_0.json", [number])
    return numbers, [[str(cell) for cell in row] for row in tables.values.tolist()], len(runs)


READERS = {"wandb": read_wandb, "tensorboard": read_tensorboard, "trackio": read_trackio, "mlflow": read_mlflow}
