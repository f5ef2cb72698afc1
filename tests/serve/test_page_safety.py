"""The chat page with hostile model texts, and with axe-core: nothing runs, nothing is loaded, everybody can read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from tests.serve.browser import Visitor, chromium
from tests.serve.conftest import Serve

pytestmark = pytest.mark.slow
ELSEWHERE = "http://elsewhere.invalid"
HOSTILE = {
    "script": "<script>window.pwned = 1; alert(1)</script>",
    "script in a block": "<div>\n\n<script src='http://elsewhere.invalid/x.js'></script>\n\n</div>",
    "image with a handler": "<img src=http://elsewhere.invalid/a.png onerror='window.pwned = 1'>",
    "svg": "<svg onload=window.pwned=1><script>window.pwned=1</script></svg>",
    "mathml": "<math><mtext><table><mglyph><style><img src=x onerror=window.pwned=1></style></mglyph></table></math>",
    "frame": "<iframe src='http://elsewhere.invalid' srcdoc='<script>parent.pwned=1</script>'></iframe>",
    "style": "<style>@import 'http://elsewhere.invalid/x.css'; body { display: none }</style>",
    "link and base": "<link rel=stylesheet href=http://elsewhere.invalid/x.css><base href=http://elsewhere.invalid/>",
    "refresh": "<meta http-equiv=refresh content='0;url=http://elsewhere.invalid'>",
    "form": "<form action=http://elsewhere.invalid><input autofocus onfocus=window.pwned=1></form>",
    "script link": "[x](javascript:window.pwned=1) <javascript:window.pwned=1> [y](JaVaScRiPt&colon;window.pwned=1)",
    "data link": "[x](data:text/html,<script>window.pwned=1</script>) [v](vbscript:x)",
    "image": "![a](http://elsewhere.invalid/a.png) ![b](//elsewhere.invalid/b.png) ![c][d]\n\n[d]: http://elsewhere.invalid/c",
    "data image": "![a](data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9YWxlcnQoMSk+)",
    "title": '[x](http://elsewhere.invalid "a\\" onmouseover=window.pwned=1 b=\\"")',
    "image's words": '![" onerror="window.pwned=1](http://elsewhere.invalid/a.png)',
    "language of code": '```"><img src=x onerror=window.pwned=1>\ncode\n```',
    "code": "```html\n</code></pre><img src=x onerror=window.pwned=1><script>window.pwned=1</script>\n```",
    "formula with a link": r"$\href{javascript:window.pwned=1}{x}$ and $\url{http://elsewhere.invalid}$",
    "formula with an image": r"$$\includegraphics[height=1em]{http://elsewhere.invalid/a.png}$$",
    "formula with html": r"$\htmlStyle{background:url(http://elsewhere.invalid)}{x} \class{hidden}{y} \id{send}{z}$",
    "formula with text": r"$\text{<img src=x onerror=window.pwned=1>}$",
    "formula that grows": r"$\def\a{xxxxxxxx}\def\b{\a\a\a\a\a\a\a\a}\def\c{\b\b\b\b\b\b\b\b}\c\c\c\c\c\c\c\c\c\c$",
    "formula without end": r"$\def\a{\a\a}\a$",
    "formula that is large": r"$\rule{99999em}{99999em}$ $\kern{-9999em} x$ $\raisebox{9999em}{y}$",
    "deep brackets": "$" + "{" * 900 + "x" + "}" * 900 + "$",
    "deep quotation": ">" * 300 + " x",
    "deep list": "\n".join("  " * depth + "- x" for depth in range(150)),
    "many dollars": "$a " * 1500,
    "tags": "</think> <think> x </think> <script>window.pwned=1</script>",
    "directions": "\u202e<script>window.pwned=1</script>\u2066 x",
}  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def visitor(serve: Serve, browser: Browser) -> Iterator[Visitor]:
    """Somebody with the page of a server that says little; afterwards nothing may have happened."""
    found = Visitor(browser, serve("<think>x</think>y"))
    yield found
    found.check()
    found.context.close()


GROW = """async (texts) => {
  const { Prose } = await import("/page/prose.js");
  for (const text of texts) {
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
  }
}"""
"""shows texts as they grow, in twelve pieces"""


def test_hostile_texts_do_nothing_in_a_stream(serve: Serve, browser: Browser) -> None:
    """Token by token from the server, in the reasoning and in the answer."""
    names = ("script", "image with a handler", "svg", "script link", "image", "formula with a link", "tags")
    texts = [HOSTILE[name] for name in names]
    served = serve(lambda prompt, sampling, call: f"<think>{texts[call]}\n\nend</think>{texts[call]}\n\nThe end.")
    visitor = Visitor(browser, served)
    page = visitor.page
    for name in names:
        visitor.ask("go on")
        visitor.wait_for_end()
        expect(page.locator(".response").last, name).to_contain_text("The end.")
        page.get_by_role("button", name="New chat").click()
        visitor.check()
    visitor.context.close()


def test_hostile_texts_do_nothing_while_they_grow(visitor: Visitor) -> None:
    for name, text in HOSTILE.items():
        visitor.page.evaluate(GROW, [text])
        assert visitor.page.locator("#turns .prose").last.inner_text().strip(), name
        print(name)  # the last one that is told did what follows
        visitor.check()


def test_what_is_left_of_them(visitor: Visitor) -> None:
    """No element that loads, runs or sends; links only to the web, and only by a click."""
    page = visitor.page
    visitor.ask("<img src=x onerror=window.pwned=1> **x**")
    visitor.wait_for_end()
    assert page.locator(".question .text").inner_text() == "<img src=x onerror=window.pwned=1> **x**"
    page.evaluate(GROW, list(HOSTILE.values()))
    for name in ("script", "img", "iframe", "style", "link", "base", "meta", "form", "input", "svg", "object"):
        assert page.locator(f"#turns {name}").count() == 0, name
    for link in page.locator("#turns a[href]").all():
        assert (link.get_attribute("href") or "").startswith(("http://", "https://", "mailto:"))
        assert link.get_attribute("rel") == "noopener noreferrer nofollow"
    assert page.locator("#turns a", has_text="image: a").first.get_attribute("href") == f"{ELSEWHERE}/a.png"
    attributes = "[...document.querySelectorAll('#turns *')].flatMap((each) => each.getAttributeNames())"
    assert not [name for name in page.evaluate(attributes) if name.startswith("on")]
    assert page.locator("#send").is_visible() and page.evaluate("document.querySelectorAll('#send').length") == 1
    assert page.evaluate("document.documentElement.scrollWidth") <= 1100, "nothing makes the page wider"


def test_a_long_block_keeps_the_page_quick(visitor: Visitor) -> None:
    """1,000 growths of one paragraph of 700 formulas: most frames draw nothing, and all is there in the end."""
    took_s = visitor.page.evaluate("""async () => {
      const { Prose } = await import("/page/prose.js");
      const element = document.createElement("div");
      document.getElementById("turns").append(element);
      const prose = new Prose(element);
      const start = performance.now();
      let text = "";
      for (let count = 0; count < 700; count++) prose.write((text += "word **bold** $x$ "));
      for (let count = 0; count < 300; count++) {
        prose.write((text += "word "));
        if (count % 10 === 0) await new Promise(requestAnimationFrame);
      }
      prose.end();
      return (performance.now() - start) / 1000;
    }""")
    assert visitor.page.locator("#turns math").count() == 700 and took_s < 10


RICH = (
    "<think>There are three apples in the basket and we add two more of them, which makes five apples.</think>"
    "## Result\n\n$$\\sum_{i=1}^{9} a_i = \\frac{1}{2} + x_1 + x_2 + x_3 + x_4 + x_5 + x_6 + x_7 + x_8 + x_9$$\n\n"
    "```python\ndef apples(first: int, more: int) -> int:  # a comment, long enough to be cut in a narrow window\n"
    "    return first + more\n```\n\n[a link](https://elsewhere.invalid) and `code`\n\n> quoted\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\nDas sind zusammen also genau \\boxed{5} schöne rote Äpfel."
)


@pytest.mark.parametrize(
    ("width", "dark"),
    [
        (1100, False),
        pytest.param(1100, True, marks=pytest.mark.soak),
        pytest.param(320, False, marks=pytest.mark.soak),
        (320, True),
    ],
)
def test_axe_finds_nothing_serious(serve: Serve, browser: Browser, width: int, dark: bool) -> None:
    served = serve(RICH, token_s=0.004, reasoning_language="de")
    visitor = Visitor(browser, served, width=width, dark=dark)
    page = visitor.page
    axe, found = Axe(), []

    def look(state: str) -> None:
        wide: Any = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{state}: the page is {wide} pixels wide"
        for violation in axe.run(page).response["violations"]:
            if violation["impact"] in ("serious", "critical"):
                found.append((state, violation["id"], [node["html"][:200] for node in violation["nodes"]]))

    look("empty")
    visitor.ask()
    expect(page.locator(".reasoning .prose")).to_contain_text("There")
    look("thinking")
    page.get_by_label("Thinks in").select_option("de")
    visitor.wait_for_end()
    expect(page.locator(".answer")).to_contain_text("schöne rote")
    page.locator(".reasoning summary").click()
    page.locator(".badge summary").click()
    look("whole")
    served.server.ready = False
    visitor.ask("again")
    expect(page.locator(".error")).to_be_visible()
    look("error")
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_role("button", name="Settings").click()
    look("settings")
    assert found == []
    visitor.check()
    visitor.context.close()
