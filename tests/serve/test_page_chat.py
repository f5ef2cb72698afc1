"""The chat page in a real browser, over the real server; the engine is scripted. test_page_safety.py: hostile texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.serve.browser import Visitor, chromium
from tests.serve.conftest import Serve, Served, eventually

pytestmark = pytest.mark.slow
Visit = Callable[..., Visitor]
ENGLISH = "There are three apples in the basket and we add two more of them, which makes five apples in all."
GERMAN = "Im Korb sind drei Äpfel, und wir legen noch zwei dazu, das macht zusammen genau fünf Äpfel im Korb."
ANSWER = "There are five apples in the basket."
RIGHT = f"<think>\n{ENGLISH}\n</think>\n\n{ANSWER}"
SLOW = f"<think>\n{(ENGLISH + ' ') * 20}\n</think>\n\n{ANSWER}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """visit(served, ...): the page, open. Afterwards nothing foreign may have been asked for."""
    visitors: list[Visitor] = []

    def open_page(served: Served, **options: Any) -> Visitor:
        visitors.append(Visitor(browser, served, **options))
        return visitors[-1]

    yield open_page
    for visitor in visitors:
        visitor.check()
        visitor.context.close()


def test_a_newcomer_chats_with_two_keys(serve: Serve, visit: Visit) -> None:
    """Reasoning is open while it comes and folds when the answer begins; then the figures and the language."""
    served = serve(RIGHT, token_s=0.004, reasoning_language="auto")
    visitor = visit(served)
    page = visitor.page
    expect(page.locator("#model")).to_have_text("tiny")
    page.get_by_role("button", name="Tom has 3 apples.").click()
    reasoning = page.locator("details.reasoning")
    expect(reasoning).to_have_attribute("open", "")
    expect(reasoning.locator("summary")).to_contain_text("Thinking, ")
    expect(reasoning.locator(".prose")).to_contain_text("There are three apples")
    visitor.wait_for_end()
    expect(reasoning).not_to_have_attribute("open", "")
    expect(reasoning.locator("summary")).to_have_text(re.compile(r"^Thought for [\d.]+ s · \d+ tokens$"))
    expect(page.locator(".answer")).to_have_text(ANSWER)
    expect(page.locator(".answer")).to_have_attribute("lang", "en")
    expect(page.locator(".badge summary")).to_have_text("✓Thought in English, as wanted")
    expect(page.locator(".figures")).to_have_text(re.compile(r"^\d+ tokens · [\d.]+ s · [\d.]+ tokens/s$"))
    page.reload()
    expect(page.locator(".answer")).to_have_text(ANSWER)


def test_a_mismatch_is_told_in_words(serve: Serve, visit: Visit) -> None:
    visitor = visit(serve(RIGHT))
    page = visitor.page
    page.get_by_label("Thinks in").select_option("de")
    page.get_by_label("enforced by").select_option("prefill")
    visitor.ask()
    expect(page.locator(".badge summary")).to_contain_text("Thought in English, not in German as wanted")
    page.locator(".badge summary").click()
    expect(page.locator(".badge dl")).to_contain_text("German, by the request")
    expect(page.locator(".badge dl")).to_contain_text("prefill")
    page.get_by_label("Thinks in").select_option("other")
    page.get_by_label("Code of the language").fill("pt-BR")
    visitor.ask()
    expect(page.locator(".badge summary").last).to_contain_text("not in Portuguese as wanted")


def test_too_few_words_are_no_match(serve: Serve, visit: Visit) -> None:
    visitor = visit(serve("<think>3+2=5</think>5", reasoning_language="de"))
    visitor.page.get_by_label("Thinks in").select_option("")
    visitor.ask()
    expect(visitor.page.locator(".badge summary")).to_contain_text("Too few words to tell whether it thought in German")


def test_stop_frees_the_tokens(serve: Serve, visit: Visit) -> None:
    served = serve(SLOW, token_s=0.02)
    visitor = visit(served)
    visitor.ask()
    expect(visitor.page.locator(".reasoning .prose")).to_contain_text("There are")
    assert served.engine.running == 1
    visitor.page.get_by_role("button", name="Stop").click()
    eventually(lambda: served.engine.running == 0 and served.server.admitted == 0)
    expect(visitor.page.locator(".response footer")).to_contain_text("Stopped.")
    visitor.ask("Again?")
    eventually(lambda: served.engine.running == 1)
    visitor.page.keyboard.press("Escape")
    eventually(lambda: served.engine.running == 0)
    assert served.engine.prompts[1].count("<assistant>") == 1, "a response without an answer is not sent back"


def test_answer_now_ends_the_reasoning(serve: Serve, visit: Visit) -> None:
    served = serve(lambda prompt, sampling, call: SLOW if call == 0 else ANSWER, token_s=0.02)
    visitor = visit(served)
    visitor.ask()
    visitor.page.get_by_role("button", name="Answer now").click()
    visitor.wait_for_end()
    expect(visitor.page.locator(".answer")).to_have_text(ANSWER)
    assert served.engine.told < 400, "the script's reasoning has about 2,000 tokens"


def test_only_the_keyboard(serve: Serve, visit: Visit) -> None:
    """Everything in order with Tab, and the focus never lost."""
    served = serve(RIGHT, token_s=0.003, reasoning_language="auto")
    visitor = visit(served)
    page = visitor.page

    def focused() -> str:
        return str(page.evaluate("document.activeElement.id || document.activeElement.textContent"))

    page.keyboard.press("Tab")
    assert focused() == "Skip to the question"
    page.keyboard.press("Enter")
    expect(page.locator("#question")).to_be_focused()
    page.keyboard.type("How many")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("apples are there?")
    page.keyboard.press("Enter")
    expect(page.locator(".question .text")).to_have_text("How many\napples are there?")
    visitor.wait_for_end()
    expect(page.locator("#question")).to_be_focused()
    seen = []
    for _ in range(6):
        page.keyboard.press("Shift+Tab")
        seen.append(focused())
    assert [text[:6] for text in seen] == ["Retry", "Copy", "✓Thoug", "Though", "Edit", "open-s"]
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#open-settings")).to_be_focused()


def test_edit_and_retry_ask_again(serve: Serve, visit: Visit) -> None:
    served = serve(lambda prompt, sampling, call: f"<think>a</think>answer {call}")
    visitor = visit(served)
    page = visitor.page
    visitor.ask("alpha")
    expect(page.locator(".answer")).to_have_text("answer 0")
    visitor.wait_for_end()
    visitor.ask("second")
    expect(page.locator(".answer")).to_have_text(["answer 0", "answer 1"])
    page.get_by_role("button", name="Retry").last.click()
    expect(page.locator(".answer")).to_have_text(["answer 0", "answer 2"])
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edit your question").fill("other")
    page.keyboard.press("Enter")
    expect(page.locator(".answer")).to_have_text(["answer 3"])
    assert "answer 0" in served.engine.prompts[2] and "alpha" in served.engine.prompts[2]
    assert "other" in served.engine.prompts[3] and "alpha" not in served.engine.prompts[3]
    assert "<think>" not in served.engine.prompts[2].partition("alpha")[2], "reasoning is not sent back"
    visitor.wait_for_end()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#welcome")).to_be_visible()


def test_settings_are_sent_and_kept(serve: Serve, visit: Visit) -> None:
    served = serve(RIGHT, temperature=0.3)
    visitor = visit(served)
    page = visitor.page
    page.get_by_role("button", name="Settings").click()
    for name, value in (("Temperature", "0.5"), ("Top p", "0.8"), ("Most tokens of a", "33"), ("Seed", "7")):
        page.get_by_label(name).fill(value)
    page.get_by_label("System message").fill("Speak like a captain.")
    page.get_by_role("button", name="Close").click()
    page.reload()
    visitor.ask()
    expect(page.locator(".response footer")).to_contain_text("cut at the limit of tokens")
    (sampling,) = served.engine.samplings
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.5, 0.8, 33, 7)
    assert "Speak like a captain." in served.engine.prompts[0]
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Empty all").click()
    page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Retry").click()
    eventually(lambda: len(served.engine.samplings) == 2)
    assert served.engine.samplings[1].temperature == 0.3


def test_an_error_is_told_in_the_servers_words(serve: Serve, visit: Visit) -> None:
    served = serve(RIGHT)
    visitor = visit(served)
    served.server.ready = False
    visitor.ask()
    alert = visitor.page.locator(".error")
    expect(alert).to_contain_text("the engine is starting: try again The server asks to wait 5 s.")
    served.server.ready = True
    alert.get_by_role("button", name="Try again").click()
    expect(visitor.page.locator(".answer")).to_have_text(ANSWER)
    expect(alert).to_have_count(0)


def test_a_key_is_asked_for_and_kept_in_the_tab_only(
    serve: Serve, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAESTRALE_API_KEY", "a-key-of-somebody-0123456789")
    visitor = visit(serve(RIGHT))
    page = visitor.page
    page.get_by_label("This server wants a key").fill("wrong")
    page.keyboard.press("Enter")
    expect(page.get_by_label("This server wants a key")).to_be_visible()
    page.get_by_label("This server wants a key").fill("a-key-of-somebody-0123456789")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("tiny")
    visitor.ask()
    expect(page.locator(".answer")).to_have_text(ANSWER)
    assert "a-key-of" not in page.evaluate("JSON.stringify(localStorage)")


def test_export(serve: Serve, visit: Visit) -> None:
    visitor = visit(serve(RIGHT, reasoning_language="auto"))
    visitor.ask()
    visitor.wait_for_end()
    saved = {}
    for name in ("JSON", "Markdown"):
        visitor.page.get_by_role("button", name="Export").click()
        with visitor.page.expect_download() as download:
            visitor.page.get_by_role("button", name=name).click()
        saved[name] = Path(download.value.path()).read_text(encoding="utf-8")
    whole = json.loads(saved["JSON"])
    assert whole["model"] == "tiny" and [turn["role"] for turn in whole["turns"]] == ["user", "assistant"]
    response = whole["turns"][1]
    assert response["reasoning"].strip() == ENGLISH and response["answer"].strip() == ANSWER
    assert response["language"]["match"] is True and response["usage"]["completion_tokens"] > 0
    assert ENGLISH in saved["Markdown"] and ANSWER in saved["Markdown"] and "as wanted" in saved["Markdown"]


def test_markdown_code_and_formulas(serve: Serve, visit: Visit) -> None:
    """What is drawn while it grows is what is drawn at once after a reload."""
    text = (
        "# Title\n\n1. one\n\n   still one\n2. two\n\n```python\nx = 1 < 2\n```\n\n$$\na^2\n\n+ b\n$$\n\n"
        "It costs $5 and $6. But $x_1$ and \\(y\\) and \\boxed{5} are formulas.\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n"
    )
    visitor = visit(serve(f"<think>{ENGLISH}</think>{text}", token_s=0.004))
    page = visitor.page
    visitor.ask()
    visitor.wait_for_end()
    answer = page.locator(".answer")
    grown = answer.inner_html()
    assert answer.locator("h3").inner_text() == "Title"
    assert answer.locator("ol").count() == 1 and "still one" in answer.locator("li").first.inner_text()
    assert answer.locator("pre").inner_text().strip() == "x = 1 < 2" and answer.locator(".hljs-number").count() == 2
    assert answer.locator("math").count() == 4 and answer.locator(".tex.display math").count() == 1
    assert "It costs $5 and $6." in answer.inner_text()
    assert answer.locator("td[align=right]").inner_text() == "2"
    page.reload()
    expect(answer.locator("math")).to_have_count(4)
    assert answer.inner_html() == grown
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer.get_by_role("button", name="Copy").click()
    eventually(lambda: "x = 1 < 2" in str(page.evaluate("navigator.clipboard.readText()")))


def test_the_reference_is_shown_without_help_from_elsewhere(serve: Serve, visit: Visit) -> None:
    visitor = visit(serve("x"), home="/docs")
    visitor.page.get_by_text("/v1/chat/completions", exact=True).first.click()
    expect(visitor.page.get_by_role("button", name="Execute", exact=True)).to_be_visible()
