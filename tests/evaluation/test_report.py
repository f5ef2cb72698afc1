"""report.html: self-contained, and harmless whatever a model wrote."""

import base64
import hashlib
import html
import json
import os
import re
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import ViewportSize

from evaluation import report
from shared.clean_text import clean
from tests.evaluation.conftest import PlainServer, evaluate, write_rows
from tests.serve.browser import chromium
from tests.serve.conftest import running

SCREENSHOTS = os.environ.get("MAESTRALE_SCREENSHOTS", "")
SIGNS = "\u202e\x9b2J"
TAKE = "document.title='taken'"
EVIL = f'</script><script>{TAKE}</script><img src=x onerror="{TAKE}"><!--<script>{SIGNS}'
NAME = f"<b>own & set{SIGNS}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An evaluation of a model that writes HTML."""
    texts, cut = tmp_path_factory.mktemp("evil"), {"content": "cut " * 20_000, "finish_reason": "length"}
    replies = [{"reasoning": EVIL, "content": rf"{EVIL} \boxed{{7}}"}, {"content": rf"{EVIL} \boxed{{{EVIL}}}"}, cut]
    row = {"problem": f"What is three plus four? {EVIL}", "answer": "7"}
    file = write_rows(texts / f"{NAME}.jsonl", row)
    with running(PlainServer(lambda _, call: replies[call % 3]).app) as url:
        evaluate(f"{url}/v1", texts / "out", file, "--samples", "6", "--concurrency", "1")
    return texts / "out"


def embedded(text: str) -> Any:
    [samples] = re.findall(r'<script type="application/json" id="samples">(.*?)</script>', text, re.DOTALL)
    return json.loads(samples)


def outside(text: str) -> str:
    return re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.DOTALL)


def test_model_output_cannot_leave_its_place(folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert text.count("<script") == 2 and text.count("</script>") == 2 and "<img" not in text and "<!--" not in text
    samples = embedded(text)
    assert len(samples) == 6 and samples[0]["reasoning"] == clean(EVIL) and clean(EVIL) in samples[0]["prompt"]
    assert "&lt;b&gt;own &amp; set" in text and NAME not in outside(text)
    assert "[... 60,000 characters left out ...]" in samples[2]["answer"]
    assert [sample["outcome"][0] for sample in samples] == ["right", "wrong", "wrong"] * 2
    assert all(clean(text) == text for text in (text, (folder / "results.json").read_text(encoding="utf-8")))
    assert "truncated" in samples[2]["outcome"] and "unextracted" in samples[2]["outcome"]


def test_nothing_runs_but_the_own_script_and_nothing_is_loaded(folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    [policy] = map(html.unescape, re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text))
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    for name, kind in (("style", "style-src"), ("script", "script-src")):
        (inside,) = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{kind} 'sha256-{digest}'" in policy
    assert not re.search(r"https?://|\bsrc=|\bhref=|@import|innerHTML|\sstyle=|\son\w+=", outside(text))


def test_large_evaluations_embed_a_part_and_say_so(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "SHOWN", 5)
    server = plain(lambda *_: r"\boxed{1}")
    rows = [{"problem": f"What is {number}?", "answer": "1", "language": "en"} for number in range(8)]
    evaluate(server.url, tmp_path / "out", write_rows(tmp_path / "n.jsonl", *rows), "--samples", "2")
    text = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "5 of 16 samples are in this file" in text and len(embedded(text)) == 5


@pytest.mark.slow
def test_a_browser_shows_the_samples_as_text_on_a_desk_and_on_a_phone(folder):
    """Nothing is cut, and axe finds nothing."""
    with chromium() as browser:
        for width, dark in ((1280, False), (390, True)):
            page = browser.new_page(
                viewport=ViewportSize(width=width, height=800), color_scheme="dark" if dark else "light"
            )
            page.goto((folder / "report.html").as_uri())
            assert page.locator("#count").inner_text() == "6 samples" and page.locator("#list li").count() == 6
            assert page.title() == "Evaluation: plain" and page.locator("img").count() == 0
            assert "<img src=x onerror=" in page.locator("#detail").inner_text()
            wide = "[...document.querySelectorAll('body, .scroll, figure')].filter(e => e.scrollWidth > e.clientWidth)"
            assert page.evaluate(f"{wide}.map(e => e.outerHTML.slice(0, 200))") == []
            assert Axe().run(page).response["violations"] == []
            if SCREENSHOTS:
                page.screenshot(path=f"{SCREENSHOTS}/evaluation-{width}.png", full_page=True)
