"""Verdicts: an interval over paired seeds decides, in either direction, or says that it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.ablate.ablation import Ablation, read
from lab.ablate.results import NOT_REPRODUCED, REPRODUCED, UNCLEAR, FinishedRuns, decide_all, verdict_on
from lab.ablate.runs import AblationRun

# differences x - y over three seeds, and half of their interval: t = 4.3027, s / sqrt(3) = 0.01 / 1.732
CLOSE = (0.09, 0.10, 0.11)
"""0.10 +- 0.0248"""


def pairs(differences: tuple[float, ...], base: float = 1.0) -> list[tuple[float, float]]:
    return [(base + difference, base) for difference in differences]


@pytest.mark.parametrize(
    ("relation", "margin", "differences", "verdict"),
    [
        ("above", 0.0, CLOSE, REPRODUCED),
        ("above", 0.07, CLOSE, REPRODUCED),
        ("above", 0.08, CLOSE, UNCLEAR),
        ("above", 0.13, CLOSE, NOT_REPRODUCED),
        ("above", 0.0, (-0.09, -0.10, -0.11), NOT_REPRODUCED),
        ("above", 0.0, (0.3, -0.1, 0.1), UNCLEAR),
        ("below", 0.0, (-0.09, -0.10, -0.11), REPRODUCED),
        ("below", 0.0, CLOSE, NOT_REPRODUCED),
        ("below", 0.13, (-0.09, -0.10, -0.11), NOT_REPRODUCED),
        ("not above", 0.13, CLOSE, REPRODUCED),
        ("not above", 0.07, CLOSE, NOT_REPRODUCED),
        ("not below", 0.0, CLOSE, REPRODUCED),
        ("not below", 0.07, (-0.09, -0.10, -0.11), NOT_REPRODUCED),
        ("not below", 0.13, (-0.09, -0.10, -0.11), REPRODUCED),
        ("as", 0.13, CLOSE, REPRODUCED),
        ("as", 0.13, (-0.09, -0.10, -0.11), REPRODUCED),
        ("as", 0.10, CLOSE, UNCLEAR),
        ("as", 0.05, CLOSE, NOT_REPRODUCED),
        ("as", 0.05, (-0.09, -0.10, -0.11), NOT_REPRODUCED),
        ("as", 0.05, (0.3, -0.1, 0.1), UNCLEAR),
        ("above", 0.0, (0.0, 0.0), NOT_REPRODUCED),
        ("not below", 0.0, (0.0, 0.0), REPRODUCED),
        ("above", 0.0, (0.1,), UNCLEAR),
    ],
)
def test_relations(relation: str, margin: float, differences: tuple[float, ...], verdict: str) -> None:
    assert verdict_on(relation, margin, pairs(differences)) == verdict


def test_a_share_is_of_the_size_of_the_other_value() -> None:
    differences = (0.39, 0.40, 0.41)  # of 4: about a tenth
    assert verdict_on("above", "9 %", pairs(differences, base=4.0)) == REPRODUCED
    assert verdict_on("above", "12 %", pairs(differences, base=4.0)) == NOT_REPRODUCED
    assert verdict_on("above", "12 %", pairs(differences, base=-4.0)) == NOT_REPRODUCED
    assert verdict_on("not above", "12 %", pairs(differences, base=-4.0)) == REPRODUCED


def test_pairs_remove_what_seeds_have_in_common() -> None:
    """The seeds differ by 1, the variants by 0.1: only pairs can tell."""
    shared = [(seed + 0.1 + 0.01 * seed, float(seed)) for seed in range(3)]
    assert verdict_on("above", 0.0, shared) == REPRODUCED
    crossed = [(shared[seed][0], shared[(seed + 1) % 3][1]) for seed in range(3)]
    assert verdict_on("above", 0.0, crossed) == UNCLEAR


def test_claims_of_a_file_are_decided_for_each_language(ablation: Ablation, finished: list[AblationRun]) -> None:
    entropy, german, french = decide_all(ablation, FinishedRuns(finished))
    assert entropy.difference is not None and entropy.difference.mean == pytest.approx(0.3)
    assert entropy.difference.half == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-4)  # 0.3, 0.2, 0.4
    assert (entropy.verdict, entropy.subset) == (REPRODUCED, "")
    assert (german.verdict, german.subset) == (UNCLEAR, "language/de")
    assert (french.verdict, french.subset) == (REPRODUCED, "language/fr")
    assert french.left is not None and french.left.mean == pytest.approx(0.9)


def test_without_pairs_nothing_is_decided(
    ablation: Ablation, launches: list[AblationRun], finished: list[AblationRun]
) -> None:
    for launch in launches:
        if (launch.variant, launch.seed) not in (("base", 0), ("symmetric", 0), ("symmetric", 1)):
            (launch.run_dir / "latest").unlink()
    decision = decide_all(ablation, FinishedRuns(finished))[0]
    assert (decision.verdict, decision.why) == (UNCLEAR, "one seed")
    (finished[0].run_dir / "latest").unlink()
    decision = decide_all(ablation, FinishedRuns(finished))[0]
    assert (decision.verdict, decision.why, decision.difference) == (UNCLEAR, "no seed has both", None)


def test_a_variant_is_compared_with_itself_at_another_time(file: Path, finished: list[AblationRun]) -> None:
    """Entropy of base: 1.0 at the first of four steps, 0.6, 0.7, 0.8 in the last two. In French 0 before, 0.9 after."""
    text = file.read_text().replace('relation = "above"', 'relation = "below"', 1)
    text = text.replace('than = "symmetric"', 'than_over = "first 1 step"', 1)
    text = text.replace('than = "symmetric"', 'than_over = "start"')
    file.write_text(text)
    entropy, german, french = decide_all(read(file), FinishedRuns(finished))
    assert entropy.difference is not None and entropy.difference.mean == pytest.approx(-0.3)
    assert entropy.verdict == REPRODUCED
    assert french.difference is not None and french.difference.mean == pytest.approx(0.9)
    assert (german.verdict, french.verdict) == (REPRODUCED, REPRODUCED)


def test_a_claim_for_each_of_nothing_is_unclear_and_not_left_out(file: Path, finished: list[AblationRun]) -> None:
    file.write_text(file.read_text().replace('each = "language"\n\n[[panels', 'each = "domain"\n\n[[panels'))
    domain = decide_all(read(file), FinishedRuns(finished))[1]
    assert (domain.verdict, domain.why) == (UNCLEAR, "no evaluation tells several domains apart")
