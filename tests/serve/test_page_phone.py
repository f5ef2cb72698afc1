"""The chat page on a phone, above all while the model thinks; and formulas that cannot be set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.serve.browser import Visitor, chromium
from tests.serve.conftest import Serve

pytestmark = pytest.mark.slow
STEPS = "\n\n".join(
    f"Step {number}: there are {number} apples in the basket, and we add two more of them, so $x_{{{number}}} = "
    f"\\frac{{{number}}}{{2}}$ is known." for number in range(1, 40)
)  # fmt: skip
BROKEN = r"Sums \(\frac{1}{2\) and $\unknowncommand{x} + 1$, but $x_1$; $$\begin{align} a &= \left( b \end{align}$$"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


def box(page: Page, selector: str) -> dict[str, float]:
    """Where an element stands in the window."""
    found: Any = page.evaluate("name => document.querySelector(name).getBoundingClientRect().toJSON()", selector)
    return dict(found)


@pytest.mark.parametrize(("width", "height"), [(360, 640), pytest.param(390, 844, marks=pytest.mark.soak)])
def test_reasoning_on_a_phone(serve: Serve, browser: Browser, width: int, height: int) -> None:
    served = serve(f"<think>\n{STEPS}\n</think>\n\n{BROKEN}", token_s=0.002, reasoning_language="en", max_tokens=40_000)
    visitor = Visitor(browser, served, width=width, height=height)
    page = visitor.page
    axe = Axe()

    def look() -> None:
        assert int(page.evaluate("document.documentElement.scrollWidth")) <= width
        found = axe.run(page).response["violations"]
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []

    visitor.ask()
    expect(page.locator(".reasoning .prose")).to_contain_text("Step 12", timeout=90_000)
    look()
    composer, dock = box(page, "#composer"), box(page, "#dock")
    assert composer["left"] >= 0 and composer["right"] <= width and composer["bottom"] <= height
    assert dock["height"] <= 0.3 * height, "what can be read is most of the window"
    for control in ("#language", "#enforcement"):
        place = box(page, control)
        assert place["width"] >= 100, f"{control}: its value can be read"
    labels = [one.bounding_box() for one in page.locator("#composer label span").all()]
    assert all(label is not None and label["height"] < 24 for label in labels), "no label takes two lines"
    for name in ("Answer now", "Stop"):
        button = page.get_by_role("button", name=name).bounding_box()
        assert button is not None and button["height"] >= 36 and button["width"] >= 60
    summary = box(page, ".reasoning summary")
    assert summary["top"] >= box(page, "header")["bottom"] - 1, "how long it thinks stays in sight"
    window = box(page, ".reasoning .window")
    assert window["height"] <= 0.5 * height and window["bottom"] <= dock["top"] + 1, "the newest words are in sight"
    reasoning = page.locator(".reasoning .window")
    assert reasoning.evaluate("w => w.scrollHeight - w.scrollTop - w.clientHeight") <= 40
    reasoning.evaluate("w => { w.scrollTop = 0; }")
    page.wait_for_timeout(500)
    assert reasoning.evaluate("w => w.scrollTop") < 40, "who reads the first ones is left alone"
    served.engine.token_s = 0
    visitor.wait_for_end()
    look()
    page.locator(".reasoning summary").click()
    expect(page.locator(".reasoning .prose")).to_be_visible()
    assert reasoning.evaluate("w => w.scrollHeight - w.clientHeight") <= 1, "opened later it is whole"
    look()
    visitor.check()
    visitor.context.close()


def test_formulas_that_cannot_be_set_are_shown_as_they_are_written(serve: Serve, browser: Browser) -> None:
    visitor = Visitor(browser, serve(f"<think>a</think>{BROKEN}"), width=390, height=844)
    visitor.ask()
    visitor.wait_for_end()
    answer = visitor.page.locator(".answer")
    assert answer.locator("math").count() == 1
    sources = [one.inner_text() for one in answer.locator("code.source").all()]
    assert sources == [r"\frac{1}{2", r"\unknowncommand{x} + 1", r"\begin{align} a &= \left( b \end{align}"]
    assert "ParseError" not in answer.inner_text() and "Expected" not in answer.inner_text()
    red: Any = visitor.page.evaluate("""[...document.querySelectorAll('.answer *')].map(e => getComputedStyle(e).color)
      .filter(color => /^rgb\\((1[6-9]|2)\\d, [0-5]?\\d, [0-5]?\\d\\)$/.test(color)).length""")
    assert red == 0 and answer.locator(".temml-error").count() == 0
    visitor.check()
    visitor.context.close()
