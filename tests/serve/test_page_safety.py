"""The chat page with hostile model texts, with axe-core, and on a phone: nothing runs, nothing is loaded, everybody can
read it."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from tests.serve.browser import Visitor, chromium
from tests.tables import read_table

pytestmark = pytest.mark.slow
HOSTILE = {row["name"]: row["text"] for row in read_table("serve/hostile_page_texts")} | {
    "deep brackets": "$" + "{" * 900 + "x" + "}" * 900 + "$",
    "deep quotation": ">" * 300 + " x",
    "deep list": "\n".join("  " * depth + "- x" for depth in range(150)),
    "many dollars": "$a " * 1500,
}
GROW = """async (text) => {
  const { Prose } = await import("/page/prose.js");
  const element = document.createElement("div");
  element.className = "prose";
  document.getElementById("turns").append(element);
  const prose = new Prose(element);
  const step = Math.ceil(text.length / 12);
  for (let end = step; end < text.length; end += step) {
    prose.write(text.slice(0, end));
    await new Promise(requestAnimationFrame);
  }
  prose.write(text);
  prose.end();
}"""
"""shows a text as it grows, in twelve pieces"""
GROW_LONG = """async () => {
  const { Prose } = await import("/page/prose.js");
  const element = document.createElement("div");
  document.getElementById("turns").append(element);
  const prose = new Prose(element);
  let [text, draws] = ["", 0];
  new MutationObserver(() => draws++).observe(element, { childList: true });
  for (let count = 0; count < 700; count++) prose.write((text += "word **bold** $x$ "));
  for (let frame = 0; frame < 30; frame++) {
    prose.write((text += "word "));
    await new Promise(requestAnimationFrame);
  }
  prose.end();
  return draws;
}"""
"""one paragraph of 700 formulas, over 30 frames; returns how many of them drew it"""
RICH = (
    "<think>There are three apples in the basket and we add two more of them, which makes five apples.</think>"
    "## Result\n\n$$\\sum_{i=1}^{9} a_i = \\frac{1}{2} + x_1 + x_2 + x_3 + x_4 + x_5 + x_6 + x_7 + x_8 + x_9$$\n\n"
    "```python\ndef apples(first: int, more: int) -> int:  # a comment, long enough to be cut in a narrow window\n"
    "    return first + more\n```\n\n[a link](https://elsewhere.invalid) and `code`\n\n> quoted\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\nDas sind zusammen also genau \\boxed{5} schöne rote Äpfel."
)
STEPS = "\n\n".join(
    f"Step {number}: there are {number} apples in the basket, and we add two more of them, so $x_{{{number}}} = "
    f"\\frac{{{number}}}{{2}}$ is known." for number in range(1, 10)
)  # fmt: skip
BROKEN = r"Sums \(\frac{1}{2\) and $\unknowncommand{x} + 1$, but $x_1$; $$\begin{align} a &= \left( b \end{align}$$"


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


def look(page, width, axe=Axe()):  # noqa: B008
    """It is no wider than the window, and nobody is kept from reading it."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    violations = axe.run(page).response["violations"]
    grave = [violation for violation in violations if violation["impact"] in ("serious", "critical")]
    assert not grave, [(rule["id"], [node["html"][:200] for node in rule["nodes"]]) for rule in grave]


def test_hostile_texts_do_nothing_in_a_stream(serve, browser):
    """Token by token from the server, in the reasoning and in the answer."""
    names = ("script", "image with a handler", "svg", "script link", "image", "formula with a link", "tags")
    texts = [HOSTILE[name] for name in names]
    served = serve(lambda prompt, sampling, call: f"<think>{texts[call]}\n\nend</think>{texts[call]}\n\nThe end.")
    with Visitor(browser, served) as visitor:
        for name in names:
            visitor.ask("go on")
            visitor.wait_for_end()
            expect(visitor.page.locator(".response").last, name).to_contain_text("The end.")
            visitor.page.get_by_role("button", name="New chat").click()
            visitor.check()


def test_hostile_texts_do_nothing_while_they_grow(serve, browser):
    """No element that loads, runs or sends is left; links only to the web, and only by a click."""
    with Visitor(browser, serve("<think>x</think>y")) as visitor:
        page = visitor.page
        visitor.ask("<img src=x onerror=window.pwned=1> **x**")
        visitor.wait_for_end()
        assert page.locator(".question .text").inner_text() == "<img src=x onerror=window.pwned=1> **x**"
        for name, text in HOSTILE.items():
            page.evaluate(GROW, text)
            assert page.locator("#turns .prose").last.inner_text().strip(), name
            print(name)  # the last one that is told did what follows
            visitor.check()
        for name in ("script", "img", "iframe", "style", "link", "base", "meta", "form", "input", "svg", "object"):
            assert page.locator(f"#turns {name}").count() == 0, name
        for link in page.locator("#turns a[href]").all():
            assert (link.get_attribute("href") or "").startswith(("http://", "https://", "mailto:"))
            assert link.get_attribute("rel") == "noopener noreferrer nofollow"
        image = page.locator("#turns a", has_text="image: a").first
        assert image.get_attribute("href") == "http://elsewhere.invalid/a.png"
        attributes = "[...document.querySelectorAll('#turns *')].flatMap((each) => each.getAttributeNames())"
        assert not [name for name in page.evaluate(attributes) if name.startswith("on")]
        assert page.locator("#send").is_visible() and page.evaluate("document.querySelectorAll('#send').length") == 1
        assert page.evaluate("document.documentElement.scrollWidth") <= 1100, "nothing makes the page wider"


def test_a_long_block_is_drawn_in_few_frames_and_is_all_there_in_the_end(serve, browser):
    with Visitor(browser, serve("x")) as visitor:
        draws = visitor.page.evaluate(GROW_LONG)
        assert visitor.page.locator("#turns math").count() == 700 and draws <= 15


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("width", "dark"), [(1100, False), (320, True)])
def test_axe_finds_nothing_serious(serve, browser, width, dark):
    served = serve(RICH, reasoning_language="de")
    with Visitor(browser, served, width=width, dark=dark) as visitor:
        page = visitor.page
        look(page, width)
        page.get_by_label("Thinks in").select_option("de")
        visitor.ask()
        visitor.wait_for_end()
        expect(page.locator(".answer")).to_contain_text("schöne rote")
        page.locator(".reasoning summary").click()
        page.locator(".badge summary").click()
        served.server.ready = False
        visitor.ask("again")
        expect(page.locator(".error")).to_be_visible()
        page.get_by_role("button", name="Edit").first.click()
        look(page, width)
        page.get_by_role("button", name="Settings").click()
        look(page, width)


def test_reasoning_on_a_phone(serve, browser):
    """What can be read is most of the window while the model thinks; formulas that cannot be set stand as written."""
    served = serve(f"<think>\n{STEPS}\n</think>\n\n{BROKEN}", token_s=0.002, reasoning_language="en", max_tokens=40_000)
    with Visitor(browser, served, width=360, height=640) as visitor:
        page = visitor.page

        def box(selector):
            """Where an element stands in the window."""
            return page.evaluate("name => document.querySelector(name).getBoundingClientRect().toJSON()", selector)

        visitor.ask()
        prose, window = page.locator(".reasoning .prose"), page.locator(".reasoning .window")
        expect(prose).to_contain_text("Step 5")
        served.engine.token_s = 0.5  # all but still
        look(page, 360)
        composer, dock, frame = box("#composer"), box("#dock"), box(".reasoning .window")
        assert composer["left"] >= 0 and composer["right"] <= 360 and composer["bottom"] <= 640
        assert dock["height"] <= 0.3 * 640
        assert all(box(control)["width"] >= 100 for control in ("#language", "#enforcement")), "values can be read"
        labels = [label.bounding_box() for label in page.locator("#composer label span").all()]
        assert all(label["height"] < 24 for label in labels), "no label takes two lines"
        for name in ("Answer now", "Stop"):
            button = page.get_by_role("button", name=name).bounding_box()
            assert button["height"] >= 36 and button["width"] >= 60
        assert box(".reasoning summary")["top"] >= box("header")["bottom"] - 1, "how long it thinks stays in sight"
        assert frame["height"] <= 0.5 * 640 and frame["bottom"] <= dock["top"] + 1, "the newest words are in sight"
        assert window.evaluate("w => w.scrollHeight - w.scrollTop - w.clientHeight") <= 40
        window.evaluate("w => { w.scrollTop = 0; }")
        served.engine.token_s = 0.002
        expect(prose).to_contain_text("Step 7")
        assert window.evaluate("w => w.scrollTop") < 40, "who reads the first ones is left alone"
        served.engine.token_s = 0
        visitor.wait_for_end()
        page.locator(".reasoning summary").click()
        expect(prose).to_be_visible()
        assert window.evaluate("w => w.scrollHeight - w.clientHeight") <= 1, "opened later it is whole"
        look(page, 360)
        answer = page.locator(".answer")
        assert answer.locator("math").count() == 1 and answer.locator(".temml-error").count() == 0
        sources = [source.inner_text() for source in answer.locator("code.source").all()]
        assert sources == [r"\frac{1}{2", r"\unknowncommand{x} + 1", r"\begin{align} a &= \left( b \end{align}"]
        assert "ParseError" not in answer.inner_text() and "Expected" not in answer.inner_text()
        colours = "[...document.querySelectorAll('.answer *')].map(each => getComputedStyle(each).color)"
        red = f"{colours}.filter(colour => /^rgb\\((1[6-9]|2)\\d, [0-5]?\\d, [0-5]?\\d\\)$/.test(colour)).length"
        assert page.evaluate(red) == 0
