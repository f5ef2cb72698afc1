"""The dashboard in a browser: running, finished, crashed, foreign runs, news, hostile texts, axe, copying.

With MAESTRALE_SCREENSHOTS=docs/images the pictures of docs/dashboard.md are written anew.
"""

import os
import shutil
import time
from typing import Any

import msgspec
import pytest
from axe_playwright_python.sync_playwright import Axe
from msgspec.structs import replace
from playwright.sync_api import Page, expect

from dashboard.run_folder import RunFolder
from dashboard.test_case import write_test
from shared.metrics import MetricsLog
from tests.dashboard.run_folders import ASKED, episode, group_of, metrics, tokenizer_of, write_foreign, write_run
from tests.serve.browser import Visitor, chromium
from tests.serve.test_page_safety import HOSTILE
from trainer.data.data_source import write_jsonl

pytestmark = pytest.mark.slow
SCREENSHOTS = os.environ.get("MAESTRALE_SCREENSHOTS", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_foreign(folder / "an-older-run")
    write_run(folder / "apples-lr3e-4", speed=1.6, steps=70, state="crashed", learning_rate=3e-4)
    write_run(folder / "apples-lr5e-5", speed=0.5, learning_rate=5e-5)
    write_run(folder / "apples", state="running")
    return folder


@pytest.fixture(scope="module")
def opened(dashboard, folder):
    expect.set_options(timeout=120_000)
    with chromium() as browser:
        yield browser, dashboard(folder)


@pytest.fixture
def visit(opened):
    """Opens the dashboard at an address; afterwards nothing may have happened that should not."""
    visitors: list[Visitor] = []

    def go(address: str = "", **how: Any) -> Visitor:
        visitors.append(Visitor(*opened, home=f"/#/{address}", **how))  # type: ignore[arg-type]
        return visitors[-1]

    yield go
    for visitor in visitors:
        visitor.check()
        visitor.context.close()


def turn_to(page: Page, address: str) -> None:
    page.goto(f"{page.url.partition('#')[0].partition('?')[0]}?{address}#/{address}")
    settled(page)


def settled(page: Page) -> None:
    """Until what is in sight has been drawn."""
    expect(page.locator("main > div")).to_be_visible()
    page.wait_for_function("!document.querySelector('.chart canvas') || document.fonts.status === 'loaded'")
    page.wait_for_timeout(300)


def test_running_finished_crashed_and_foreign_runs(visit):
    page = visit().page
    expect(page.locator(".runs tbody tr")).to_have_count(4)
    rows = page.locator(".runs tbody tr").all()
    told = {row.locator("th").inner_text(): row.locator(".state").inner_text() for row in rows}
    assert told == {"apples": "running", "apples-lr5e-5": "finished", "apples-lr3e-4": "crashed",
                    "an-older-run": "unknown"}  # fmt: skip
    expect(page.locator(".chart canvas")).to_have_count(6)
    differing = page.locator("tr", has=page.get_by_role("rowheader", name="optimiser.learning_rate"))
    assert "0.0003" in differing.inner_text() and "0.00005" in differing.inner_text()
    page.get_by_label("Add a chart of").select_option("sft/loss")  # its rows have steps of their own
    expect(page.locator(".chart canvas")).to_have_count(7)
    page.get_by_label("Filter runs").fill("crash")
    expect(page.locator(".runs tbody tr")).to_have_count(1)
    page.get_by_role("link", name="apples-lr3e-4").click()
    expect(page.locator("h1")).to_have_text("apples-lr3e-4")
    expect(page.locator(".alarm").first).to_contain_text("ended before its time")
    page.locator(".alarm summary").first.click()
    expect(page.locator(".alarm p").first).to_contain_text("goes on from its last checkpoint")
    expect(page.locator(".chart", has_text="Staleness")).to_have_count(1)
    page.locator(".timeline").scroll_into_view_if_needed()
    expect(page.locator(".timeline .legend")).to_contain_text("wait for completions")
    turn_to(page, "an-older-run")
    expect(page.locator("h1")).to_have_text("an-older-run")
    page.locator(".chart", has_text="my/score").scroll_into_view_if_needed()
    expect(page.locator(".chart", has_text="my/score").locator("canvas")).to_have_count(1)
    expect(visit("no-such-run").page.get_by_role("alert")).to_have_text("there is no such run here")


def test_a_picture_of_the_whole_page_has_every_chart_and_no_axis_of_shares_leaves_0_to_1(visit):
    page = visit("apples").page
    charts = page.locator(".chart:not(.empty)")
    expect(charts.first).to_be_visible()
    expect(page.locator(".chart:not(.empty):not(:has(canvas))")).to_have_count(0)  # nobody has scrolled
    assert charts.count() > 8 and page.evaluate("scrollY") == 0
    script = "async ([low, high, unit]) => { const main = document.querySelector('script[type=module]').src; " \
             "return (await import(new URL('chart.js', main))).spread(low, high, unit); }"  # fmt: skip
    for low, high, unit, ends in (
        (-0.02, 1.04, "share", [0, 1]),
        (0.99, 1.0, "share", [0.9892, 1]),
        (-1, 1, "", [-1.16, 1.16]),
    ):
        assert page.evaluate(script, [low, high, unit]) == pytest.approx(ends)


def test_parts_of_evaluations_have_a_chart_by_kind_and_every_line_a_look_of_its_own(visit):
    """Eleven lines have eight colours: the marks of the others are broken as the lines are."""
    page = visit("apples-lr5e-5").page
    charts = page.locator(".chart", has=page.get_by_role("heading", name="Accuracy by"))
    expect(charts.locator("h3")).to_have_text(
        ["Accuracy by language asked for, sampled", "Accuracy by language of the problem, sampled"]
    )
    expect(charts.nth(0).locator(".legend .name")).to_have_text(list(ASKED))
    looks = (
        charts.nth(0).locator(".mark").evaluate_all("marks => marks.map((mark) => getComputedStyle(mark).background)")
    )
    assert len(set(looks)) == 11 and ["gradient" in look for look in looks] == [False] * 8 + [True] * 3
    assert page.locator(".facts").inner_text().split("\n").count("a step (mean of 20)") == 1


def test_axes_and_smoothing(visit):
    page = visit("apples").page
    chart = page.locator(".chart", has=page.get_by_role("heading", name="Reward", exact=True))
    expect(chart.locator("canvas")).to_have_count(1)
    chart.locator(".u-over").hover()
    expect(chart.locator(".at")).to_contain_text("step")
    page.get_by_label("over").select_option("tokens")
    for left in range(30, 130):  # each move of the pointer reads the axis that is drawn by then
        chart.locator(".u-over").hover(position={"x": left, "y": 60})
        if "trained tokens" in chart.locator(".at").inner_text():
            break
    else:
        pytest.fail("the axis is not drawn")
    before = chart.locator("canvas").screenshot()
    page.get_by_label("smooth").fill("0.9")
    assert chart.locator("canvas").screenshot() != before


def test_a_step_is_seen_while_the_page_is_open(visit, folder):
    """In the list of runs, on the page of the run, and among its rollouts; test_acceptance.py measures how soon."""
    run = folder / "apples"
    pages = [visit("").page, visit("apples").page, visit("apples/rollouts").page]
    for page in pages:
        settled(page)
        expect(page.locator("#live")).to_have_text("live")
    log = MetricsLog(run / "metrics.jsonl", resume_step=120)
    tokenizer = tokenizer_of(["x"])
    for page, step in zip(pages, (121, 122, 123), strict=True):
        page.bring_to_front()
        settled(page)
        log.write(step, metrics(step))
        write_jsonl(run / f"rollouts/step_{step}.jsonl", [group_of(1, step, tokenizer)])
        waited_for = {121: ".runs", 122: ".facts", 123: ".steps output"}[step]
        expect(page.locator(waited_for).first).to_contain_text(str(step))


def test_a_group_on_one_screen(visit):
    page = visit("apples-lr5e-5/rollouts").page
    expect(page.locator(".groups li")).to_have_count(4)
    page.get_by_role("button", name="cut").click()
    expect(page.locator(".groups li")).to_have_count(9)
    page.get_by_role("button", name="masked").click()
    expect(page.locator(".groups li")).to_have_count(3)
    page.get_by_role("button", name="all", exact=True).click()
    page.keyboard.press("Tab")
    page.keyboard.press("/")
    page.keyboard.type("square root")
    expect(page.locator("p[role=status]")).to_contain_text("that is all")
    page.get_by_label("Search").fill("hundred and forty")
    expect(page.locator(".groups li").first).to_contain_text("sqrt")
    page.locator(".groups a").first.click()
    cards = page.locator(".card")
    expect(cards).to_have_count(8)
    expect(page.locator(".problem math")).to_have_count(1)
    shown = cards.filter(has_text="answer is right").first
    assert "correctness +0.900" in shown.inner_text() and shown.locator("math").count() >= 1
    page.get_by_label("show").select_option("cut")
    assert sum(card.is_visible() for card in cards.all()) == 1
    page.get_by_label("show").select_option("all")
    page.locator("#way").select_option("tokens")
    token = page.locator(".token").nth(3)
    assert "logprobs" in (token.get_attribute("title") or "") and "teacher" in (token.get_attribute("title") or "")
    for shade, words in (("version", "version 11"), ("logprobs", "−4 nats"), ("teacher − engine", "0.2 nats")):
        page.locator("#shade").select_option(shade)
        expect(page.locator(".controls + .note")).to_contain_text(words)
        expect(page.locator(".token:is(.s2, .s3, .s4, .s8)").first).to_be_visible()
    page.keyboard.press("Escape")
    page.locator("h1").click()
    page.keyboard.press("j")
    expect(page.locator("h1")).to_contain_text("group 4 of 4")
    expect(page.locator(".turn.environment")).to_have_text("environmenthigher")
    page.keyboard.press("k")
    expect(page.locator("h1")).to_contain_text("group 3 of 4")


def test_one_click_copies_a_test_case(visit, folder):
    """test_rollouts.py lets such cases run."""
    visitor = visit("apples-lr5e-5/rollouts/120/1")
    visitor.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = visitor.page
    page.get_by_role("button", name="Copy as test case").first.click()
    expect(page.locator(".card").first.get_by_role("status")).to_contain_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == write_test(RunFolder(folder / "apples-lr5e-5"), 120, 1, 0)
    turn_to(page, "apples-lr5e-5/rollouts/120/3")
    page.get_by_role("button", name="Copy as test case").first.click()
    expect(page.locator(".card").first.get_by_role("status")).to_contain_text("its environment graded it")


def test_hostile_texts_are_texts(visit, folder):
    """As problem, completion, reason, answer, turn, language, name of a metric and of a setting; 1 MB of them too."""
    run = write_run(folder / "hostile", steps=12, rollouts=0)
    texts = [*HOSTILE.values(), "\x1b[2J\x1b]8;;http://elsewhere.invalid\x07x \u202eevil\u2066", "<b>" * 350_000]
    group = episode(0)
    first, graded = group.completions[0], group.rewards[0]
    assert graded is not None
    group.completions = [replace(first, turns=[]) for _ in texts]
    group.rewards = [replace(graded, reason=text[:9000], answer=text[:9000], extra={text[:90]: 0.5}) for text in texts]
    group.texts, group.turns = texts, [[replace(group.turns[0][0], text=text)] for text in texts]
    problem = replace(group.prompt.problem, text="\n\n".join(texts)[:20_000], id=texts[0], language="<i>")
    group.prompt = replace(group.prompt, problem=problem)
    write_jsonl(run / "rollouts/step_12.jsonl", [group, replace(group, turns=[])])
    with (run / "metrics.jsonl").open("ab") as stream:
        stream.write(msgspec.json.encode({"step": 13, "<img src=x onerror=window.pwned=1>": 1}) + b"\n")
    (run / "config.toml").write_text('steps = "<img src=x onerror=window.pwned=1>"\n')
    visitor = visit()
    page = visitor.page
    for address in ("", "hostile", "hostile/rollouts", "hostile/rollouts/12/0", "hostile/rollouts/12/1"):
        turn_to(page, address)
        if address.endswith("1"):
            assert page.locator(".card").count() == len(texts)
            page.locator("#way").select_option("plain")
            *_, control, long = page.locator(".card").all()
            assert "␛[2J" in control.inner_text() and "⟨U+202E⟩" in control.inner_text()
            assert "more characters" in long.inner_text()
            page.locator("#way").select_option("tokens")
        assert page.locator("main :is(script, img, iframe, style, link, base, form, object)").count() == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= 1100
        visitor.check()
    shutil.rmtree(run)


PLACES = {
    "runs": "", "run": "apples", "crashed": "apples-lr3e-4", "older": "an-older-run",
    "rollouts": "apples-lr5e-5/rollouts", "group": "apples-lr5e-5/rollouts/120/0",
}  # fmt: skip
"""name of a picture -> address"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (360, True)])
def test_axe_finds_nothing_at_any_width(visit, width, dark):
    """In the dark axe looks at an alarm and at the shades of tokens, whose colours are others."""
    page = visit(width=width, height=860 if width > 500 else 740, dark=dark).page

    def check(name: str) -> None:
        assert int(page.evaluate("document.documentElement.scrollWidth")) <= width, name
        if dark and name not in ("crashed", "tokens"):
            return
        violations = Axe().run(page).response["violations"]
        assert not [(name, one["id"], [node["html"][:160] for node in one["nodes"]][:3]) for one in violations]

    for name, address in PLACES.items():
        turn_to(page, address)
        check(name)
        if SCREENSHOTS:
            page.screenshot(path=f"{SCREENSHOTS}/dashboard-{name}-{'phone-dark' if dark else 'wide'}.png")
    page.locator("#way").select_option("tokens")
    page.locator(".token").first.wait_for()
    check("tokens")
    turn_to(page, "apples-lr5e-5/rollouts/120/3")
    page.locator(".turn").first.wait_for()
    check("episode")
    page.get_by_role("button", name="Keys").click()
    check("keys")


def test_a_long_path_or_name_makes_no_page_wider_than_a_phone(visit, folder):
    """In a phase of the launch, as the name of the run, of a setting and of a metric."""
    long = "of-a-project-with-a-long-name" * 3
    run = write_run(folder / long, steps=12)
    with (run / "phases.jsonl").open("ab") as stream:
        phase = f"running /home/someone/{long}/prepare.py"
        stream.write(msgspec.json.encode({"time": time.time(), "phase": phase}) + b"\n")
    with (run / "metrics.jsonl").open("ab") as stream:
        stream.write(msgspec.json.encode({"step": 13, f"reward/{long}": 1}) + b"\n")
    (run / "config.toml").write_text(f'{long} = "x"\n')
    page = visit(width=390, height=740).page
    for address in ("", long, f"{long}/rollouts"):
        turn_to(page, address)
        assert int(page.evaluate("document.documentElement.scrollWidth")) <= 390, address
    shutil.rmtree(run)


def test_a_run_whose_link_is_opened_before_it_begins_appears(visit, folder):
    page = visit("later").page
    expect(page.get_by_role("alert")).to_have_text("there is no such run here")
    expect(page.locator("#live")).to_have_text("live")
    run = write_run(folder / "later", steps=20, state="running")
    expect(page.locator(".state")).to_have_text("running")
    shutil.rmtree(run)
