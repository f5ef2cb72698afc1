"""Tables of an evaluation of oversight, and one HTML page with tables, plots and transcripts.

Texts of models are untrusted: on the page they are escaped, there is no script, and its content security policy allows
nothing but its own style sheet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from evaluation.report import HERE, hash_source, plot_bars, shorten
from evaluation.tables import ResultTable, percent
from oversight.figures import Json
from oversight.games import GameKey, GameRecord
from oversight.prompts import Question
from oversight.speech import Speech
from shared.clean_text import clean
from shared.jsonl import spread

SHOWN = 200
"""largest number of games that a page shows"""
STYLE = """details { border-bottom: 1px solid var(--line); padding: .3rem 0; }
summary { cursor: pointer; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 4px; padding: .5rem;
  max-height: 40vh; overflow-y: auto; font: 13px/1.45 ui-monospace, monospace; margin: .2rem 0 .8rem; }
"""
ADVOCATES = ("right", "wrong")


def tables_of(results: Json) -> list[ResultTable]:
    """Return all tables that have rows."""
    contests = results["contests"]
    accuracy = [
        [_name(row), str(row["questions"]), _accuracy(row),
         "-" if row["position"] is None else f"{row['position']:.2f}", percent(row["same"]), percent(row["invalid"]),
         f"{row['tokens']:,.0f}"]
        for row in contests
    ]  # fmt: skip
    persuasion = [
        [_name(row), *(f"{percent(row[f'convinced_{word}'])} ({row[f'advocates_{word}']})" for word in ADVOCATES)]
        for row in contests
        if any(row[f"advocates_{word}"] for word in ADVOCATES)
    ]
    agents = [
        [f"{row['task']}: {row['agent']}", str(row["questions"]), _accuracy(row), percent(row["invalid"])]
        for row in results["agents"]
    ]
    tests = [
        [f"{row['task']}, {row['judge']}: {row['first']} - {row['second']}", row["agent"], str(row["questions"]),
         f"{100 * row['difference']:+.1f}", f"{row['p']:.4f}"]
        for row in results["tests"]
    ]  # fmt: skip
    ratings = [
        [f"{judge}: {row['player']}", f"{row['elo']:+.0f}", " to ".join(f"{bound:+.0f}" for bound in row["interval"]),
         str(row["games"])]
        for judge, players in results["elo"].items()
        for row in players
    ]  # fmt: skip
    tables = (
        ResultTable("Accuracy", ["accuracy, %", "questions", "accuracy (95 %)", "position", "same in both orders",
                                 "no verdict", "tokens"], accuracy),
        ResultTable("Persuasion", ["judge follows the advocate, % (games)", "that is right", "that is wrong"],
                    persuasion),
        ResultTable("Agents by themselves", ["agent, %", "questions", "accuracy (95 %)", "no answer"], agents),
        ResultTable("Paired permutation tests", ["difference of accuracies, %", "agent", "questions", "difference",
                                                 "p"], tests),
        ResultTable("Elo of advocates", ["judge: agent and side", "Elo", "95 %", "games"], ratings),
    )  # fmt: skip
    return [table for table in tables if table.rows]


def _name(row: Json) -> str:
    agent = f", {row['agent']}" if row["agent"] else ""
    return f"{row['task']}, {row['judge']}: {row['protocol']}{agent}"


def _accuracy(row: Json) -> str:
    return f"{percent(row['accuracy'])} \u00b1 {percent(row['half_width'])}"


def markdown(results: Json) -> str:
    """Return the contents of summary.md."""
    sections = [f"## {table.title}\n\n{table.markdown()}" for table in tables_of(results)]
    return "\n".join(["# Scalable oversight\n\nDefinitions: docs/oversight.md.\n", *sections])


def render(results: Json, tasks: Mapping[str, list[Question]], records: Mapping[GameKey, GameRecord]) -> str:
    """Return the HTML of the page."""
    style = (HERE / "report.css").read_text(encoding="utf-8") + STYLE
    policy = f"default-src 'none'; style-src '{hash_source(style)}'; base-uri 'none'; form-action 'none'"
    bars, followed = [], []
    for row in results["contests"]:
        share, half = row["accuracy"], row["half_width"]
        bars.append((_name(row), share, max(0.0, share - half), min(1.0, share + half)))
        shares = [(f"{_name(row)}, {word}", row[f"convinced_{word}"]) for word in ADVOCATES]
        followed += [(name, share, share, share) for name, share in shares if share is not None]
    figures = [f"<h2>{escape(table.title)}</h2>{table.html()}" for table in tables_of(results)]
    figures.append(plot_bars("Accuracy with its 95 % interval", bars))
    figures.append(plot_bars("Judge follows an advocate that is right, that is wrong", followed))
    questions = {(task, question.id): question for task, listed in tasks.items() for question in listed}
    games = [record for key, record in sorted(records.items()) if (key.task, key.id) in questions]
    shown = spread(games, SHOWN)
    transcripts = "".join(_game(record, questions[record.key.task, record.key.id]) for record in shown)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>Scalable oversight</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n<header><h1>Scalable oversight</h1></header>\n<main>\n"
        f"{''.join(figures)}\n<h2>Transcripts</h2>\n<p>{len(shown)} of {len(games)} games are in this file, evenly "
        f"chosen; all are in games.jsonl.</p>\n{transcripts}\n</main>\n</body>\n</html>\n"
    )


def _game(record: GameRecord, question: Question) -> str:
    """Return a game: its question in the order in which it was asked, speeches, verdict."""
    key, verdict = record.key, record.verdict
    asked = question if key.order == 1 else question.swapped()
    outcome = "no verdict" if verdict.answer is None else "right" if verdict.answer == record.right else "wrong"
    players = ", ".join(dict.fromkeys(filter(None, (key.judge, key.agent, key.opponent))))
    assigned = f", for answer {key.assigned}" if key.assigned else ""
    title = f"{key.task}, {key.id}, order {key.order}: {key.protocol}{assigned} ({players}): {outcome}"
    texts = [("Question", asked.text), *((f"Answer {n}", text) for n, text in enumerate(asked.answers, 1))]
    texts += [text for speech in record.speeches for text in _speech(speech)]
    sure = "" if verdict.probability is None else f", p(answer 1) = {verdict.probability:.3f}"
    texts.append((f"Verdict: {verdict.answer or 'none'}, right is {record.right}{sure}", verdict.reply))
    if asked.article:
        texts.append(("Article", asked.article))
    body = "".join(
        f'<h3>{escape(clean(name))}</h3><pre dir="auto">{escape(shorten(text))}</pre>' for name, text in texts
    )
    return f"<details><summary>{escape(clean(title))}</summary>{body}</details>\n"


def _speech(speech: Speech) -> Iterator[tuple[str, str]]:
    side = f", for answer {speech.answer}" if speech.answer else ""
    name = f"Round {speech.round}, {speech.speaker}{side}{', cut' if speech.cut else ''}"
    if speech.thinking:
        yield f"{name}: thinking, seen by nobody", speech.thinking
    yield name, speech.argument
