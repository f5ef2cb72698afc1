"""The trackers that a run folder can be sent to (track.py): W&B, TensorBoard, trackio, MLflow.

A new one is a class with the methods of `Tracker`, a line of TRACKERS, its name in the setting `trackers`, and an extra
in pyproject.toml.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from shared.section import flat

PROJECT = "maestrale"
"""project or experiment where the tracker's own variables name none"""
COLUMNS = ("step", "problem", "completion", "answer", "verdict", "reward", "reason")
"""Columns of a table of samples."""
Rows = list[list[Any]]  # [samples][COLUMNS]


class TrackedRun(NamedTuple):
    """The run that is sent."""

    name: str
    folder: Path
    settings: dict[str, Any]
    """The settings in config.toml."""

    def kept_id(self, tracker: str, make: Callable[[], str] = lambda: uuid.uuid4().hex[:8]) -> tuple[str, bool]:
        """The id of the tracker's run, kept in the run folder, and whether it was made now."""
        path = self.folder / "trackers" / f"{tracker}.id"
        if path.exists() and (known := path.read_text().strip()):
            return known, False
        path.write_text(made := make())
        return made, True


class Tracker(Protocol):
    """What a tracker can do. It may raise anything."""

    def row(self, row: Mapping[str, Any], values: Mapping[str, float], again: bool) -> None:
        """Take a row of metrics: all of it (step, kind, time), and its finite numbers by name. again: whether a resume
        made a step again that was sent before."""

    def samples(self, step: int, when: float, rows: Rows) -> None:
        """Take a table of some completions of a step. when: Unix time."""

    def close(self, finished: bool) -> None:
        """Write or upload what is left. finished: whether the run trained all its steps."""


class WandbRun:
    """Weights & Biases. Its own variables say where (WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, WANDB_DIR, ...)."""

    def __init__(self, run: TrackedRun):
        import wandb

        for variable, value in (("PROJECT", PROJECT), ("NAME", run.name), ("DIR", str(run.folder))):
            os.environ.setdefault(f"WANDB_{variable}", value)
        number, _ = run.kept_id("wandb")
        self.table, settings = wandb.Table, wandb.Settings(console="off")
        self.run = wandb.init(id=number, resume="allow", config=run.settings, settings=settings)
        self.known = {"samples"}

    def row(self, row: Mapping[str, Any], values: Mapping[str, float], again: bool) -> None:
        axis = "sft/step" if row["kind"] == "sft" else "step"  # its own counts messages: an evaluation may come late
        for name in values.keys() - self.known:
            self.run.define_metric(name, step_metric=axis)
        self.known |= values.keys()
        self.run.log({axis: row["step"], **values})

    def samples(self, step: int, when: float, rows: Rows) -> None:
        self.run.log({"step": step, "samples": self.table(columns=list(COLUMNS), data=rows)})

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


class TensorBoardFiles:
    """Event files in the folder tensorboard/ of the run; those of SFT, whose steps count apart, in sft/ below it."""

    def __init__(self, run: TrackedRun):
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.event, self.summary, self.tensor = event_pb2, summary_pb2, tensor_pb2
        self.text_metadata, self.open = create_summary_metadata, EventFileWriter
        self.folder = run.folder / "tensorboard"
        self.files: dict[str, Any] = {}
        self.again = False

    def write(self, kind: str, step: int, when: float, **content: Any) -> None:
        """Write an event. content: its field and value."""
        folder = "sft" if kind == "sft" else ""
        if folder not in self.files:
            self.files[folder] = self.open(str(self.folder / folder), flush_secs=10)
        self.files[folder].add_event(self.event.Event(wall_time=when, step=step, **content))

    def row(self, row: Mapping[str, Any], values: Mapping[str, float], again: bool) -> None:
        head = row["kind"], row["step"], row["time"]
        if again and not self.again:  # readers forget what an earlier launch wrote from this step on
            self.write(*head, session_log=self.event.SessionLog(status=self.event.SessionLog.START))
        self.again = again
        numbers = [self.summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self.write(*head, summary=self.summary.Summary(value=numbers))

    def samples(self, step: int, when: float, rows: Rows) -> None:
        lines = [COLUMNS, ["---"] * len(COLUMNS), *([as_markdown(cell) for cell in row] for row in rows)]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines).encode()
        tensor = self.tensor.TensorProto(dtype="DT_STRING", string_val=[text])
        value = self.summary.Summary.Value(
            tag="samples", tensor=tensor, metadata=self.text_metadata("samples", "completions of the step")
        )
        self.write("train", step, when, summary=self.summary.Summary(value=[value]))

    def close(self, finished: bool) -> None:
        for file in self.files.values():
            file.close()


def as_markdown(cell: object) -> str:
    """A cell of a table in Markdown: every sign that could mean something, in Markdown or HTML, by its number."""
    text = re.sub(r"[^\w\s]|_", lambda sign: f"&#{ord(sign[0])};", str("" if cell is None else cell))
    return re.sub(r"\s", " ", text.replace("\n", "<br>"))


class TrackioRun:
    """trackio: a local database, or where its own variables say (TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL)."""

    def __init__(self, run: TrackedRun):
        import trackio

        number, _ = run.kept_id("trackio")  # runs are found by name: the id makes it this folder's own
        name = f"{run.name}-{number}"
        self.table = trackio.Table
        self.run = trackio.init(PROJECT, name=name, config=run.settings, resume="allow", embed=False)

    def row(self, row: Mapping[str, Any], values: Mapping[str, float], again: bool) -> None:
        self.run.log(dict(values), step=row["step"])

    def samples(self, step: int, when: float, rows: Rows) -> None:
        self.run.log({"samples": self.table(list(COLUMNS), rows)}, step=step)

    def close(self, finished: bool) -> None:
        self.run.finish()


class MlflowRun:
    """MLflow, at MLFLOW_TRACKING_URI (by its default a database in the working folder), in MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, run: TrackedRun):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self.metric, self.client = Metric, MlflowClient()

        def create() -> str:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            known = self.client.get_experiment_by_name(name)
            experiment = known.experiment_id if known else self.client.create_experiment(name)
            return str(self.client.create_run(experiment, run_name=run.name).info.run_id)

        self.number, new = run.kept_id("mlflow", create)
        if new:
            settings = [Param(name, str(value)[:500]) for name, value in flat(run.settings).items()]
            for first in range(0, len(settings), 100):  # the most that it takes at once
                self.client.log_batch(self.number, params=settings[first : first + 100])
        else:
            self.client.update_run(self.number, status="RUNNING")

    def row(self, row: Mapping[str, Any], values: Mapping[str, float], again: bool) -> None:
        when, step = int(row["time"] * 1000), row["step"]
        names = {re.sub(r"[^\w.:/ -]", "_", name): value for name, value in values.items()}
        self.client.log_batch(self.number, [self.metric(name, value, when, step) for name, value in names.items()])

    def samples(self, step: int, when: float, rows: Rows) -> None:
        columns = {name: [row[number] for row in rows] for number, name in enumerate(COLUMNS)}
        first = step - step % 500  # an artifact is written anew for every table that it gets
        self.client.log_table(self.number, columns, f"samples/from_step_{first}.json")

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.number, "FINISHED" if finished else "FAILED")


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WandbRun,
    "tensorboard": TensorBoardFiles,
    "trackio": TrackioRun,
    "mlflow": MlflowRun,
}
