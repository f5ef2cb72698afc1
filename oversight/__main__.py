"""Evaluate oversight: `python -m oversight stories --agents A@URL --judges B@URL`; `--help` says all."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from evaluation import tables
from evaluation.client import START_S, weights_of
from evaluation.runner import work_through
from oversight import page
from oversight.figures import summarise
from oversight.games import GamePlayer, OversightFolder, jobs_of
from oversight.players import ModelPlayer
from oversight.prompts import Question
from oversight.questions import read_tasks
from oversight.settings import OversightSettings, load
from shared.atomic_write import append_line, write_whole
from shared.chat_endpoint import FAILURES
from shared.clean_text import clean
from shared.errors import ConfigError, run_command
from shared.json_reader import parse_json
from shared.progress import CleanConsole, duration
from shared.progress_bar import ProgressBar

RESULTS, SUMMARY, REPORT, LAUNCHES = "results.json", "summary.md", "report.html", "launches.jsonl"


async def weights_of_player(player: ModelPlayer) -> str:
    """Return the name of a player's weights, "" if its server tells none. Raises ConfigError if nobody answers."""
    try:
        async with asyncio.timeout(START_S):
            await player.request("GET", f"{player.url}/models")
    except (TimeoutError, *FAILURES) as error:
        raise ConfigError(f"{player.model}: {player.url}/models: {type(error).__name__}: {error}") from None
    return await weights_of(player, player.model)


async def play(settings: OversightSettings, tasks: dict[str, list[Question]], stop: asyncio.Event) -> tuple[bool, int]:
    """Play what is missing, and write the results; returns whether all was played, and how many games failed."""
    players = [
        {(made := settings.player(text, tokens)).model: made for text in listed}
        for listed, tokens in ((settings.agents, settings.max_tokens), (settings.judges, settings.judge_tokens))
    ]
    everybody = [player for one in players for player in one.values()]
    try:
        weights = {player.model: await weights_of_player(player) for player in everybody}
        with OversightFolder(settings, weights) as folder:
            games = GamePlayer(settings, folder, *players)
            jobs = list(jobs_of(tasks, settings, list(players[0]), list(players[1])))
            left = [job for job in jobs if games.missing(job)]
            launch = {"began": datetime.now(UTC).isoformat(timespec="seconds"), "missing": len(left),
                      "settings": settings.model_dump(), "maestrale": version("maestrale")}  # fmt: skip
            append_line(folder.folder / LAUNCHES, json.dumps(launch, sort_keys=True).encode())
            bar = ProgressBar("playing", "played", len(jobs) - len(left), len(jobs))
            try:
                votes = [job for job in left if job.keys[0].protocol == "votes"]
                for phase in ([job for job in left if job not in votes], votes):  # votes spend what debates took
                    if not await work_through(phase, games.work, settings.concurrency, stop, bar):
                        return False, len(games.failed)
            finally:
                bar.close()
            if left_out := {player.model: sorted(player.left_out) for player in everybody if player.left_out}:
                append_line(folder.folder / LAUNCHES, json.dumps({"left_out": left_out}, sort_keys=True).encode())
            for reason in games.failed[:5]:
                print(f"warning: {clean(reason)}", file=sys.stderr)
            keys = {key for job in jobs for key in job.keys}
            records = {key: record for key, record in folder.rows.items() if key in keys}
            results = await asyncio.to_thread(summarise, records.values(), settings.seed)
            write_whole(folder.folder / RESULTS, json.dumps(results, indent=1, sort_keys=True) + "\n")
            write_whole(folder.folder / SUMMARY, page.markdown(results))
            write_whole(folder.folder / REPORT, page.render(results, tasks, records))
            return True, len(games.failed)
    finally:
        for player in everybody:
            await player.close()


async def evaluate(settings: OversightSettings) -> int:
    """Evaluate; returns the exit code. Raises MaestraleError."""
    tasks = await asyncio.to_thread(read_tasks, settings)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    began = time.monotonic()
    whole, failed = await play(settings, tasks, stop)
    if not whole:
        print(f"stopped; the same command goes on with what {settings.out} lacks", file=sys.stderr)
        return 130
    console = CleanConsole()
    console.width = max(console.width, tables.WIDTH)
    for table in page.tables_of(parse_json((Path(settings.out) / RESULTS).read_bytes())):
        console.print(table.rich())
    took = duration(time.monotonic() - began)
    again = f"; {failed} games failed: the same command plays them again" if failed else ""
    console.print(
        f"{settings.out}: {RESULTS}, {SUMMARY}, {REPORT} (open it in a browser); {took}{again}", soft_wrap=True
    )
    return int(failed > 0)


def main(arguments: list[str]) -> int:
    """Parse and run; returns the exit code."""
    return run_command(lambda: asyncio.run(evaluate(load(arguments))))


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
