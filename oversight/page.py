"""Tables of an evaluation of oversight, and one HTML page with tables, plots and transcripts.

Texts of models are untrusted: on the page they are escaped, there is no script, and its content security policy allows
nothing but its own style sheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from evaluation.report import HERE, hash_source, plot_bars, shorten
from evaluation.tables import ResultTable, percent
from oversight.figures import Json
from oversight.games import GameKey, GameRecord
from oversight.question import Question, Speech
from shared.clean_text import clean
from shared.jsonl import spread

SHOWN = 200
"""largest number of games that a page shows"""
LABEL = 330
STYLE = """details { border-bottom: 1px solid var(--line); padding: .3rem 0; }
summary { cursor: pointer; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 4px; padding: .5rem;
  max-height: 40vh; overflow-y: auto; font: 13px/1.45 ui-monospace, monospace; margin: .2rem 0 .8rem; }
"""


def accuracy_table(found: Json) -> ResultTable:
    """Return accuracy and bias: a row for each protocol of each judge, task and agent."""
    rows = [
        [_name(one), str(one["questions"]), f"{percent(one['accuracy'])} \u00b1 {percent(one['half_width'])}",
         "-" if one["position"] is None else f"{one['position']:.2f}", percent(one["same"]), percent(one["invalid"]),
         f"{one['tokens']:,.0f}"]
        for one in found["contests"]
    ]  # fmt: skip
    head = ["accuracy, %", "questions", "accuracy (95 %)", "position", "same in both orders", "no verdict", "tokens"]
    return ResultTable("Accuracy", head, rows)


def persuasion_table(found: Json) -> ResultTable:
    """Return how often judges follow an advocate that is right, and one that is wrong."""
    rows = [
        [
            _name(one),
            *(f"{percent(one[f'convinced_{word}'])} ({one[f'advocates_{word}']})" for word in ("right", "wrong")),
        ]
        for one in found["contests"]
        if one["advocates_right"] or one["advocates_wrong"]
    ]
    head = ["judge follows the advocate, % (games)", "that is right", "that is wrong"]
    return ResultTable("Persuasion", head, rows)


def agent_table(found: Json) -> ResultTable:
    """Return how often agents are right by themselves."""
    rows = [
        [f"{one['task']}: {one['agent']}", str(one["questions"]),
         f"{percent(one['accuracy'])} \u00b1 {percent(one['half_width'])}", percent(one["invalid"])]
        for one in found["agents"]
    ]  # fmt: skip
    return ResultTable("Agents by themselves", ["agent, %", "questions", "accuracy (95 %)", "no answer"], rows)


def permutation_table(found: Json) -> ResultTable:
    """Return the paired tests."""
    rows = [
        [f"{one['task']}, {one['judge']}: {one['first']} - {one['second']}", one["agent"], str(one["questions"]),
         f"{100 * one['difference']:+.1f}", f"{one['p']:.4f}"]
        for one in found["tests"]
    ]  # fmt: skip
    head = ["difference of accuracies, %", "agent", "questions", "difference", "p"]
    return ResultTable("Paired permutation tests", head, rows)


def elo_table(found: Json) -> ResultTable:
    """Return the ratings."""
    rows = [
        [f"{judge}: {one['player']}", f"{one['elo']:+.0f}", " to ".join(f"{bound:+.0f}" for bound in one["interval"]),
         str(one["games"])]
        for judge, players in found["elo"].items()
        for one in players
    ]  # fmt: skip
    return ResultTable("Elo of advocates", ["judge: agent and side", "Elo", "95 %", "games"], rows)


def tables_of(found: Json) -> list[ResultTable]:
    """Return all tables that have rows."""
    made = (
        accuracy_table(found),
        persuasion_table(found),
        agent_table(found),
        permutation_table(found),
        elo_table(found),
    )
    return [table for table in made if table.rows]


def _name(one: Json) -> str:
    agent = f", {one['agent']}" if one["agent"] else ""
    return f"{one['task']}, {one['judge']}: {one['protocol']}{agent}"


def markdown(found: Json) -> str:
    """Return the contents of summary.md."""
    parts = [f"## {table.title}\n\n{table.markdown()}" for table in tables_of(found)]
    return "\n".join(["# Scalable oversight\n\nDefinitions: docs/oversight.md.\n", *parts])


def render(found: Json, tasks: Mapping[str, list[Question]], records: Mapping[GameKey, GameRecord]) -> str:
    """Return the HTML of the page."""
    style = (HERE / "report.css").read_text(encoding="utf-8") + STYLE
    policy = f"default-src 'none'; style-src '{hash_source(style)}'; base-uri 'none'; form-action 'none'"
    bars = [
        (_name(one), one["accuracy"], max(0.0, one["accuracy"] - one["half_width"]),
         min(1.0, one["accuracy"] + one["half_width"]))
        for one in found["contests"]
    ]  # fmt: skip
    followed = [
        (f"{_name(one)}, {word}", share, share, share)
        for one in found["contests"]
        for word in ("right", "wrong")
        if (share := one[f"convinced_{word}"]) is not None
    ]
    figures = [f"<h2>{escape(table.title)}</h2>{table.html()}" for table in tables_of(found)]
    figures.append(plot_bars("Accuracy with its 95 % interval", bars, LABEL))
    figures.append(plot_bars("Judge follows an advocate that is right, that is wrong", followed, LABEL))
    questions = {(task, one.id): one for task, listed in tasks.items() for one in listed}
    games = [record for key, record in sorted(records.items()) if (key.task, key.id) in questions]
    shown = spread(games, SHOWN)
    told = "".join(_game(record, questions[record.key.task, record.key.id]) for record in shown)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>Scalable oversight</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n<header><h1>Scalable oversight</h1></header>\n<main>\n"
        f"{''.join(figures)}\n<h2>Transcripts</h2>\n<p>{len(shown)} of {len(games)} games are in this file, evenly "
        f"chosen; all are in games.jsonl.</p>\n{told}\n</main>\n</body>\n</html>\n"
    )


def _game(record: GameRecord, question: Question) -> str:
    """Return a game: its question in the order in which it was asked, speeches, verdict."""
    key, verdict = record.key, record.verdict
    asked = question if key.order == 1 else question.swapped()
    outcome = "no verdict" if verdict.answer is None else "right" if verdict.answer == record.right else "wrong"
    players = ", ".join(dict.fromkeys(filter(None, (key.judge, key.agent, key.opponent))))
    assigned = f", for answer {key.assigned}" if key.assigned else ""
    title = f"{key.task}, {key.id}, order {key.order}: {key.protocol}{assigned} ({players}): {outcome}"
    parts = [("Question", asked.text), *((f"Answer {n}", text) for n, text in enumerate(asked.answers, 1))]
    parts += [part for speech in record.speeches for part in _speech(speech)]
    sure = "" if verdict.probability is None else f", p(answer 1) = {verdict.probability:.3f}"
    parts += [(f"Verdict: {verdict.answer or 'none'}, right is {record.right}{sure}", verdict.reply)]
    if asked.article:
        parts.append(("Article", asked.article))
    body = "".join(
        f'<h3>{escape(clean(name))}</h3><pre dir="auto">{escape(shorten(text))}</pre>' for name, text in parts
    )
    return f"<details><summary>{escape(clean(title))}</summary>{body}</details>\n"


def _speech(speech: Speech) -> list[tuple[str, str]]:
    cut = ", cut" if speech.cut else ""
    side = f", for answer {speech.answer}" if speech.answer else ""
    name = f"Round {speech.round}, {speech.speaker}{side}{cut}"
    hidden = [(f"{name}: thinking, seen by nobody", speech.thinking)] if speech.thinking else []
    return [*hidden, (name, speech.argument)]
