"""The chat page in a real browser, over the real server; the engine is scripted. test_page_safety.py: hostile texts."""

import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.serve.browser import Visitor, chromium
from tests.serve.conftest import eventually

pytestmark = pytest.mark.slow
ENGLISH = "There are three apples in the basket and we add two more of them, which makes five apples in all."
ANSWER = "There are five apples in the basket."
RIGHT = f"<think>\n{ENGLISH}\n</think>\n\n{ANSWER}"
SLOW = f"<think>\n{(ENGLISH + ' ') * 20}\n</think>\n\n{ANSWER}"


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.fixture
def visit(browser, serve):
    """visit(script, setting=value, ...): the page of a server. Afterwards nothing foreign may have been asked for."""
    with ExitStack() as visits:

        def open_page(script, home="/", **settings):
            return visits.enter_context(Visitor(browser, serve(script, **settings), home=home))

        yield open_page


def test_a_newcomer_chats_with_two_keys_and_takes_the_conversation_home(visit):
    """Reasoning is open while it comes and folds when the answer begins; then the figures and the language."""
    visitor = visit(RIGHT, token_s=0.05, reasoning_language="auto")
    page = visitor.page
    expect(page.locator("#model")).to_have_text("tiny")
    page.get_by_role("button", name="Tom has 3 apples.").click()
    reasoning = page.locator("details.reasoning")
    expect(reasoning).to_have_attribute("open", "")
    expect(reasoning.locator("summary")).to_contain_text("Thinking, ")
    expect(reasoning.locator(".prose")).to_contain_text("There are three apples")
    visitor.served.engine.token_s = 0
    visitor.wait_for_end()
    expect(reasoning).not_to_have_attribute("open", "")
    expect(reasoning.locator("summary")).to_have_text(re.compile(r"^Thought for [\d.]+ s · \d+ tokens$"))
    expect(page.locator(".answer")).to_have_text(ANSWER)
    expect(page.locator(".answer")).to_have_attribute("lang", "en")
    expect(page.locator(".badge summary")).to_have_text("✓Thought in English, as wanted")
    expect(page.locator(".figures")).to_have_text(re.compile(r"^\d+ tokens · [\d.]+ s · [\d.]+ tokens/s$"))
    page.reload()
    expect(page.locator(".answer")).to_have_text(ANSWER)
    saved = {}
    for name in ("JSON", "Markdown"):
        page.get_by_role("button", name="Export").click()
        with page.expect_download() as download:
            page.get_by_role("button", name=name).click()
        saved[name] = Path(download.value.path()).read_text(encoding="utf-8")
    whole = json.loads(saved["JSON"])
    assert whole["model"] == "tiny" and [turn["role"] for turn in whole["turns"]] == ["user", "assistant"]
    response = whole["turns"][1]
    assert response["reasoning"].strip() == ENGLISH and response["answer"].strip() == ANSWER
    assert response["language"]["match"] is True and response["usage"]["completion_tokens"] > 0
    assert ENGLISH in saved["Markdown"] and ANSWER in saved["Markdown"] and "as wanted" in saved["Markdown"]


def test_a_mismatch_is_told_in_words_and_too_few_words_are_no_match(visit):
    visitor = visit(RIGHT, reasoning_language="de")
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
    visitor.served.engine.script = lambda *_: "3+2=5</think>5"
    page.get_by_label("Thinks in").select_option("")
    visitor.ask()
    expect(page.locator(".badge summary").last).to_contain_text("Too few words to tell whether it thought in German")


def test_stop_frees_the_tokens_and_answer_now_ends_the_reasoning(visit):
    visitor = visit(lambda prompt, sampling, call: ANSWER if call == 3 else SLOW, token_s=0.02)
    page, engine = visitor.page, visitor.served.engine
    visitor.ask()
    expect(page.locator(".reasoning .prose")).to_contain_text("There are")
    assert engine.running == 1
    page.get_by_role("button", name="Stop").click()
    eventually(lambda: engine.running == 0 and visitor.served.server.admitted == 0)
    expect(page.locator(".response footer")).to_contain_text("Stopped.")
    visitor.ask("Again?")
    eventually(lambda: engine.running == 1)
    page.keyboard.press("Escape")
    eventually(lambda: engine.running == 0)
    assert engine.prompts[1].count("<assistant>") == 1, "a response without an answer is not sent back"
    visitor.ask("And now?")
    page.get_by_role("button", name="Answer now").click()
    visitor.wait_for_end()
    expect(page.locator(".answer").last).to_have_text(ANSWER)
    assert len(engine.prompts) == 4, "the answer was sampled behind reasoning that had not ended"


def test_only_the_keyboard(visit):
    """Everything in order with Tab, and the focus never lost."""
    visitor = visit(RIGHT, token_s=0.003, reasoning_language="auto")
    page = visitor.page

    def focused():
        return page.evaluate("document.activeElement.id || document.activeElement.textContent")

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
        seen.append(focused()[:6])
    assert seen == ["Retry", "Copy", "✓Thoug", "Though", "Edit", "open-s"]
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#open-settings")).to_be_focused()


def test_edit_and_retry_ask_again_also_after_an_error(visit):
    visitor = visit(lambda prompt, sampling, call: f"<think>a</think>answer {call}")
    page, prompts = visitor.page, visitor.served.engine.prompts
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
    assert "answer 0" in prompts[2] and "alpha" in prompts[2]
    assert "other" in prompts[3] and "alpha" not in prompts[3]
    assert "<think>" not in prompts[2].partition("alpha")[2], "reasoning is not sent back"
    visitor.wait_for_end()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#welcome")).to_be_visible()
    visitor.served.server.ready = False
    visitor.ask()
    alert = page.locator(".error")
    expect(alert).to_contain_text("the engine is starting: try again The server asks to wait 5 s.")
    visitor.served.server.ready = True
    alert.get_by_role("button", name="Try again").click()
    expect(page.locator(".answer")).to_have_text("answer 4")
    expect(alert).to_have_count(0)


def test_settings_are_sent_and_kept(visit):
    visitor = visit(RIGHT, temperature=0.3)
    page, engine = visitor.page, visitor.served.engine
    page.get_by_role("button", name="Settings").click()
    for name, value in (("Temperature", "0.5"), ("Top p", "0.8"), ("Most tokens of a", "33"), ("Seed", "7")):
        page.get_by_label(name).fill(value)
    page.get_by_label("System message").fill("Speak like a captain.")
    page.get_by_role("button", name="Close").click()
    page.reload()
    visitor.ask()
    expect(page.locator(".response footer")).to_contain_text("cut at the limit of tokens")
    (sampling,) = engine.samplings
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.5, 0.8, 33, 7)
    assert "Speak like a captain." in engine.prompts[0]
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Empty all").click()
    page.get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Retry").click()
    eventually(lambda: len(engine.samplings) == 2)
    assert engine.samplings[1].temperature == 0.3


def test_a_key_is_asked_for_and_kept_in_the_tab_only(visit, monkeypatch):
    monkeypatch.setenv("MAESTRALE_API_KEY", "a-key-of-somebody-0123456789")
    visitor = visit(RIGHT)
    page = visitor.page
    for key in ("wrong", "a-key-of-somebody-0123456789"):
        expect(page.get_by_label("This server wants a key")).to_be_visible()
        page.get_by_label("This server wants a key").fill(key)
        page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("tiny")
    visitor.ask()
    expect(page.locator(".answer")).to_have_text(ANSWER)
    assert "a-key-of" not in page.evaluate("JSON.stringify(localStorage)")


def test_markdown_code_and_formulas(visit):
    """What is drawn while it grows is what is drawn at once after a reload."""
    text = (
        "# Title\n\n1. one\n\n   still one\n2. two\n\n```python\nx = 1 < 2\n```\n\n$$\na^2\n\n+ b\n$$\n\n"
        "It costs $5 and $6. But $x_1$ and \\(y\\) and \\boxed{5} are formulas.\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n"
    )
    visitor = visit(f"<think>{ENGLISH}</think>{text}", token_s=0.004)
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
    eventually(lambda: "x = 1 < 2" in page.evaluate("navigator.clipboard.readText()"))


@pytest.mark.soak
def test_the_reference_is_shown_without_help_from_elsewhere(visit):
    page = visit("x", home="/docs").page
    page.get_by_text("/v1/chat/completions", exact=True).first.click()
    expect(page.get_by_role("button", name="Execute", exact=True)).to_be_visible()
