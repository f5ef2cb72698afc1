"""The process of one tracker: hands rows of metrics and tables of samples to its library (trackers.py starts it).

Started as `python -m trainer.tracker_process NAME DESCRIPTOR`; the descriptor is its end of the socket. It is the only
one that loads these libraries. Their output goes to trackers/NAME.log of the run.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from shared.launch.deaths import ENDING
from shared.metrics import decode_row
from shared.section import flat
from trainer.trackers import COLUMNS, END_S, Handled, Message, TrackedEnd, TrackedRow, TrackedRun, TrackedSamples

PROJECT = "maestrale"
"""project or experiment where the tracker's own variables name none"""


class Tracker(Protocol):
    """What a tracker can do. Whatever its library raises is counted and told."""

    def row(self, row: Mapping[str, Any], values: Mapping[str, float]) -> None:
        """Take a row of metrics: all of it (step, kind, time), and its finite numbers by name."""

    def samples(self, samples: TrackedSamples) -> None:
        """Take a table of completions."""

    def close(self, finished: bool) -> None:
        """Write or upload what is left."""


def kept_id(run: TrackedRun, name: str, make: Callable[[], str]) -> tuple[str, bool]:
    """The id of the tracker's run, kept in the run folder, and whether it was made now."""
    path = Path(run.folder, "trackers", f"{name}.id")
    if path.exists() and (found := path.read_text().strip()):
        return found, False
    path.write_text(made := make())
    return made, True


def random_id() -> str:
    """Eight random characters."""
    return uuid.uuid4().hex[:8]


class WandbRun:
    """Weights & Biases. Its own variables say where (WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, WANDB_DIR, ...)."""

    def __init__(self, run: TrackedRun):
        import wandb

        for variable, value in (("PROJECT", PROJECT), ("NAME", run.name), ("DIR", run.folder)):
            os.environ.setdefault(f"WANDB_{variable}", value)
        number, _ = kept_id(run, "wandb", random_id)
        self.table, settings = wandb.Table, wandb.Settings(console="off")
        self.run = wandb.init(id=number, resume="allow", config=run.settings, settings=settings)
        self.known = {"samples"}

    def row(self, row: Mapping[str, Any], values: Mapping[str, float]) -> None:
        axis = "sft/step" if row["kind"] == "sft" else "step"  # its own counts messages: an evaluation may come late
        for name in values.keys() - self.known:
            self.run.define_metric(name, step_metric=axis)
        self.known |= values.keys()
        self.run.log({axis: row["step"], **values})

    def samples(self, samples: TrackedSamples) -> None:
        table = self.table(columns=list(COLUMNS), data=samples.rows)
        self.run.log({"step": samples.step, "samples": table})

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
        self.folder = Path(run.folder, "tensorboard")
        self.files = {"": self.open(str(self.folder), flush_secs=10)}
        if run.version:  # readers forget what an earlier launch wrote of steps that are made again
            again = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self.files[""].add_event(event_pb2.Event(wall_time=time.time(), step=run.version + 1, session_log=again))

    def write(self, kind: str, step: int, when: float, values: list[Any]) -> None:
        """Write an event. values: `Summary.Value`s."""
        part = "sft" if kind == "sft" else ""
        if part not in self.files:
            self.files[part] = self.open(str(self.folder / part), flush_secs=10)
        summary = self.summary.Summary(value=values)
        self.files[part].add_event(self.event.Event(wall_time=when, step=step, summary=summary))

    def row(self, row: Mapping[str, Any], values: Mapping[str, float]) -> None:
        numbers = [self.summary.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self.write(row["kind"], row["step"], row["time"], numbers)

    def samples(self, samples: TrackedSamples) -> None:
        lines = [COLUMNS, ["---"] * len(COLUMNS), *([as_markdown(cell) for cell in row] for row in samples.rows)]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines).encode()
        tensor = self.tensor.TensorProto(dtype="DT_STRING", string_val=[text])
        value = self.summary.Summary.Value(
            tag="samples", tensor=tensor, metadata=self.text_metadata("samples", "completions of the step")
        )
        self.write("train", samples.step, samples.time, [value])

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

        number, _ = kept_id(run, "trackio", random_id)  # runs are found by name: the id makes it this folder's own
        name = f"{run.name}-{number}"
        self.table = trackio.Table
        self.run = trackio.init(PROJECT, name=name, config=run.settings, resume="allow", embed=False)

    def row(self, row: Mapping[str, Any], values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=row["step"])

    def samples(self, samples: TrackedSamples) -> None:
        self.run.log({"samples": self.table(list(COLUMNS), samples.rows)}, step=samples.step)

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
            found = self.client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else self.client.create_experiment(name)
            return str(self.client.create_run(experiment, run_name=run.name).info.run_id)

        self.number, new = kept_id(run, "mlflow", create)
        if new:
            settings = [Param(name, str(value)[:500]) for name, value in flat(run.settings).items()]
            for first in range(0, len(settings), 100):  # the most that it takes at once
                self.client.log_batch(self.number, params=settings[first : first + 100])
        else:
            self.client.update_run(self.number, status="RUNNING")

    def row(self, row: Mapping[str, Any], values: Mapping[str, float]) -> None:
        when, step = int(row["time"] * 1000), row["step"]
        names = {re.sub(r"[^\w.:/ -]", "_", name): value for name, value in values.items()}
        self.client.log_batch(self.number, [self.metric(name, value, when, step) for name, value in names.items()])

    def samples(self, samples: TrackedSamples) -> None:
        columns = {name: [row[place] for row in samples.rows] for place, name in enumerate(COLUMNS)}
        first = samples.step - samples.step % 500  # an artifact is written anew for every table that it gets
        self.client.log_table(self.number, columns, f"samples/from_step_{first}.json")

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.number, "FINISHED" if finished else "FAILED")


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WandbRun,
    "tensorboard": TensorBoardFiles,
    "trackio": TrackioRun,
    "mlflow": MlflowRun,
}


def read(line: socket.socket, incoming: queue.SimpleQueue[Message | None]) -> None:
    """Put the messages of the controller into the queue, None behind the last. From then on the process has END_S."""
    while True:
        try:
            data = line.recv(1 << 22)
        except ConnectionResetError:
            continue  # it has ended with answers unread; what it had sent is still to be read
        if not data:
            break
        incoming.put(msgspec.json.decode(data, type=Message))
    signal.alarm(END_S)  # nothing handles it: the kernel ends the process, whatever hangs in it
    incoming.put(None)


def handle(tracker: Tracker, message: TrackedRow | TrackedSamples) -> None:
    """Hand a message to the tracker. Raises what its library raises."""
    if isinstance(message, TrackedSamples):
        tracker.samples(message)
        return
    row = decode_row(bytes(message.line))
    numbers = {name: value for name, value in row.items() if name not in ("step", "kind", "time") and value is not None}
    tracker.row(row, numbers)


def serve(line: socket.socket, name: str) -> int:
    """Hand over what the controller sends until it ends. Returns the exit code."""
    incoming: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    threading.Thread(target=read, args=(line, incoming), daemon=True).start()
    handled, finished = Handled(), False

    def answer(error: Exception | None = None) -> None:
        if error is not None:
            handled.problem = f"{type(error).__name__}: {error}".replace("\n", " ")[:500]
        with suppress(OSError):
            line.send(msgspec.json.encode(handled), socket.MSG_DONTWAIT)

    run = incoming.get()
    assert isinstance(run, TrackedRun)
    try:
        tracker = TRACKERS[name](run)
    except Exception as error:
        answer(error)
        raise
    while (message := incoming.get()) is not None:
        if isinstance(message, TrackedEnd):
            finished = finished or message.finished
        elif isinstance(message, (TrackedRow, TrackedSamples)):
            handled.messages += 1
            try:
                handle(tracker, message)
            except Exception as error:  # noqa: BLE001 - the next row may be taken
                handled.failed += 1
                answer(error)
            else:
                answer()
    tracker.close(finished)
    return 0


def main() -> int:
    """Entry point of the process."""
    name, number = sys.argv[1:]
    for request in ENDING:
        signal.signal(request, signal.SIG_IGN)  # the run goes on until the controller has saved
    os.set_inheritable(int(number), False)  # else a process that the library starts could hold the socket open
    os.nice(10)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    return serve(socket.socket(fileno=int(number)), name)


if __name__ == "__main__":
    sys.exit(main())
