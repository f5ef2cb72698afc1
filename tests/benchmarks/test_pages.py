"""Pages that benchmarks write: what they gather stands in the results files, and their figures follow by hand."""

import json
from dataclasses import replace

import pytest

from benchmarks import oversight
from benchmarks.asynchrony import ahead
from benchmarks.end_to_end import StepTime
from benchmarks.enforcement import HEAD, LANGUAGES, Outcome, in_language, loss, matrix, questions, rows, verdict
from benchmarks.figures import Figure, Measured, Place
from benchmarks.matrix import ABSENT, of_cards, of_other_cpus
from benchmarks.matrix import CARDS as CARD_RESULTS
from benchmarks.matrix import HEAD as MATRIX_HEAD
from benchmarks.screenshots import screenshots
from benchmarks.startup import BATCH, BEGIN, PEER, STEP, figures, phases
from benchmarks.trainable import fewest, shared_settings, trainable_section
from examples.quickstart.word_problems import is_validation
from lab.plan.scenario import CARDS, MODELS
from shared.errors import ConfigError, RunError
from trainer.colocate import share

RIGHT_LANGUAGE = [Outcome("en", "en", True, True, 1.0, 30, 1)] * 100


def test_rows_of_the_matrix_by_hand(tmp_path, root):
    title = "8b, 18 of 32 layers, 32,768 tokens, one sequence, all layers recomputed"
    values = {
        title: 9363.4, f"{title}: MFU": 0.39, f"{title}: MFU of this run": 0.5, f"{title}: memory": 124.06,
        "0.6b, 4,096 tokens, nothing recomputed": None, "step of 8,192 tokens with adapters of rank 16: time": 1.6,
        "step with adapters: largest memory": 0.8,
    }  # fmt: skip
    items = [{"figures": [{"name": name, "value": value} for name, value in values.items()]}]
    (tmp_path / "card.json").write_text(json.dumps({"card": "CARD", "date": "2026-01-02", "items": items}))
    whole, beside = of_cards(tmp_path)
    assert whole == [
        "Llama 3.1 8B, 18 of 32 layers", "all weights", "32,768, one sequence", "all layers", "CARD", "9,363 tokens/s",
        "39.0 %", "124 GiB", "2026-01-02",
    ]  # fmt: skip
    assert beside[1] == "adapters of rank 16" and beside[5] == "0.625 of that of all weights"
    assert beside[7] == "0.800 of that of all weights"
    shown = [Figure("step, 4,096 tokens, float32", [180.0, 200.0], "tokens/s"), Figure("other", [1.0], "")]
    shown.append(Figure("MFU, 4,096 tokens, float32", [0.5, 0.7], ""))
    measured = Measured(Place("2 cores", {}, "abc", "2026-01-02"), shown)
    [row] = of_other_cpus({"training": measured, "rollout": measured})
    assert row[2:] == ["4,096", "nothing", "2 cores; float32", "190 tokens/s", "60.0 %", "not measured", "2026-01-02"]
    page, written = (root / "docs" / "matrix.md").read_text(encoding="utf-8"), list(of_cards(CARD_RESULTS))
    assert len(written) > 20
    assert all(len(row) == len(MATRIX_HEAD) and f"| {' | '.join(row)} |" in page for row in written)
    assert ("| SmolLM2-135M | adapters of rank 16 | 4,096 |" in page) != (ABSENT in page)


def other(count: int, match: bool | None, correct: bool, refused: bool = False) -> list[Outcome]:
    return [Outcome("en", "de", match, correct, 2.0, 0 if refused else 40, 0 if refused else 1, refused)] * count


def test_enforcement_counts_undetermined_and_refused_responses_as_not_in_the_language():
    outcomes = [*other(6, True, True), *other(2, None, True), *other(1, False, True), *other(1, False, False, True)]
    assert in_language(outcomes) == 0.6
    row = dict(zip(HEAD, next(rows({"strict": outcomes})), strict=True))
    assert row == {
        "enforcement": "strict", "language asked for": "another one", "responses": "10", "in it": "**0.600**",
        "too few words": "2", "refused": "1", "right": "0.900", "tokens": "40.0", "seconds, median": "2.00",
        "tries": "1.00",
    }  # fmt: skip
    lines = matrix([*RIGHT_LANGUAGE, *other(1, True, True), *other(3, False, True)]).splitlines()
    assert lines[0].startswith("| question | en | fr | de |") and len(lines) == 2 + len(LANGUAGES)
    assert lines[2].startswith("| en | 1.00 | 0.00 | 0.25 |")
    asked = questions(3)
    assert [question.language for question in asked] == [language for language in LANGUAGES for _ in range(3)]
    assert all(is_validation(question.start, question.changes) and not question.asked for question in asked)


@pytest.mark.parametrize(("right", "wrong", "undetermined", "holds"), [
    (98, 2, 0, "yes"), (90, 10, 0, "**no**"), (80, 0, 20, "**no**"),
])  # fmt: skip
def test_enforcement_has_to_hold_both_bounds(right, wrong, undetermined, holds):
    outcomes = [*other(right, True, True), *other(wrong, True, False), *other(undetermined, None, True)]
    assert verdict("m", "prompt", [*RIGHT_LANGUAGE, *outcomes])[-1] == holds
    assert loss([*RIGHT_LANGUAGE, *outcomes]) == pytest.approx(wrong / 100)


def test_the_page_of_an_oversight_evaluation_says_kills_and_bias(tmp_path):
    contests = [{"protocol": "qa", "position": 1.25}, {"protocol": "debate", "position": None}]
    (tmp_path / "results.json").write_text(json.dumps({"contests": contests}))
    (tmp_path / "summary.md").write_text("# Scalable oversight\n\nDefinitions: docs.\n\n## Accuracy\n\nrows\n")
    (tmp_path / "games.jsonl").write_bytes(b"{}\n" * 9)
    page = oversight.page(tmp_path, ["stories", f"--out={tmp_path}"], [2, 5], 60.0)
    assert "killed (SIGKILL) with 2 and 5 of 9 games" in page and "qa 1.25." in page and str(tmp_path) not in page
    assert page.rstrip().endswith("## Accuracy\n\nrows")


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [{"70b", "405b"}, pytest.param(set(), marks=pytest.mark.soak)], ids=["few", "all"])
def test_the_page_of_what_can_be_trained_is_what_the_code_computes(root, monkeypatch, left_out):
    """The largest models take most of the time."""
    text = (root / "docs" / "plan.md").read_text(encoding="utf-8")
    between = text.partition("<!-- what it can train -->\n")[2].partition("<!-- end of what it can train -->")[0]
    rows = [row for row in between.splitlines(keepends=True) if row.split("|")[1].strip() not in left_out]
    monkeypatch.setattr("benchmarks.trainable.MODELS", {name: MODELS[name] for name in MODELS if name not in left_out})
    assert "".join(rows) == trainable_section(), "run: python -m benchmarks plan"


def test_cells_of_what_can_be_trained_are_what_a_launch_decides():
    """8B on H100: four cards in turns, two are refused by the arithmetic of the launch in every width."""
    assert fewest(MODELS["8b"], CARDS["h100"], 4096) == "4, in turns"
    for config in shared_settings(MODELS["8b"], 2, 4096):
        with pytest.raises(ConfigError, match="not even in turns"):
            share(config, MODELS["8b"], 80e9, 256 << 30)
    cards = [replace(CARDS["h100"], memory_bytes=gb * 1e9) for gb in (60, 80, 141, 400)]
    counts = [int(fewest(MODELS["8b"], card, 4096).partition(",")[0]) for card in cards]
    assert counts == sorted(counts, reverse=True) and counts[-1] == 1


BEGUN = [
    {"time": 104.0, "phase": "making"}, {"time": 106.0, "phase": "loading"}, {"time": 110.0, "phase": "training"},
    {"time": 119.0, "phase": "evaluating"},
]  # fmt: skip


def test_phases_of_a_start_fill_the_time_until_the_first_step_is_written():
    first = {"time": 115.0, "time/wait_batch_s": 3.5}
    assert phases(100.0, BEGUN, first) == {BEGIN: 4.0, "making": 2.0, "loading": 4.0, BATCH: 3.5, STEP: 1.5}
    twice = [{"time": 101.0, "phase": "a"}, {"time": 103.0, "phase": "b"}, {"time": 104.0, "phase": "a"}, *BEGUN[2:]]
    assert phases(100.0, twice, first)["a"] == 2.0 + 6.0, "both times count"
    with pytest.raises(RunError, match="in the phase 'loading', not in 'training'"):
        phases(100.0, BEGUN, {"time": 109.0, "time/wait_batch_s": 1.0})
    by_name = {row.name: row.values for row in figures([{"a": 6.0, "b": 4.0}, {"a": 8.0}], [4.0, 6.0])}
    assert by_name["launch to first trained step"] == [10.0, 8.0]
    assert by_name["launch to first trained step, beside the import"] == [2.0, 1.6]
    assert by_name[PEER] == [4.0, 6.0] and by_name["phase: b"] == [4.0, 0.0]


def test_a_lead_stands_beside_the_median_of_the_synchronous_launches():
    def times(*seconds: float) -> list[StepTime]:
        return [StepTime(step, 100) for step in seconds]

    lead = ahead({0: [times(2, 4), times(4, 4), times(5, 5)], 2: [times(1, 3), times(3, 3)]})
    assert [(row.name, row.values) for row in lead] == [
        ("quickstart, synchronous: step", [3, 4, 5]),
        ("quickstart, async level 2: step", [2, 3]),
        ("quickstart, async level 2: step time", pytest.approx([0.5, 0.75])),
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_picture_of_the_chat_page_is_drawn(tmp_path):
    list(screenshots(quick=True, out=tmp_path, run=tmp_path / "none"))
    pictures = sorted((tmp_path / "quick").iterdir())
    assert [picture.name for picture in pictures] == ["chat_dark.png", "chat_desktop.png", "chat_narrow.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 20_000 for path in pictures)
