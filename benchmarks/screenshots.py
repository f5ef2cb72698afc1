"""Pictures: the chat page for docs/serving.md, where nothing is a measurement, and a real run for README.md.

Needs Chromium and the dev extra. The engine of the chat page says a text that is written here, so that they show
everything the page can show. The run is a finished one, on the dashboard.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser

from benchmarks.figures import ROOT, Section, benchmark
from dashboard.app import create_app as create_dashboard
from serve.app import create_app
from serve.settings import ServerSettings
from shared.chat import Chat
from tests.serve.browser import Visitor, chromium
from tests.serve.conftest import Served, running
from tests.serve.fake_engine import ScriptedEngine
from tests.shared.test_chat import make_folder

GERMAN = """<think>
Im Korb sind am Anfang drei Äpfel, und dann kommen noch zwei dazu. Also muss ich die beiden Zahlen zusammenzählen:
$3 + 2 = 5$. Zur Probe zähle ich rückwärts, und das geht auf.
</think>

Im Korb sind **fünf Äpfel**. Allgemein ist die Summe der ersten $n$ Zahlen

$$\\sum_{i=1}^{n} i = \\frac{n\\,(n+1)}{2}$$

und in Python:

```python
def apples(first: int, more: int) -> int:
    return first + more  # 5
```

Die Antwort ist \\boxed{5}.
"""
ENGLISH = """<think>
There are five apples in the basket, and we take away three of them, so I have to subtract these numbers.
</think>

Es bleiben noch zwei Äpfel im Korb übrig, denn von den fünf Äpfeln haben wir drei weggenommen: \\boxed{2}.
"""
PICTURES = {"desktop": (1000, 860, False), "dark": (1000, 860, True), "narrow": (360, 760, False)}
"""name -> width and height in pixels, dark"""


def draw_run(browser: Browser, run: Path, path: Path) -> None:
    """Draw the page of a run, from its first charts on."""
    with running(create_dashboard(run.resolve().parent, "shown")) as url:
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.goto(f"{url}/?token=shown#/{run.name}")
        page.locator("canvas").nth(7).wait_for()
        page.wait_for_timeout(1000)  # charts draw what they have loaded
        page.screenshot(path=path)
        page.close()


@benchmark(page="docs/images")
def screenshots(
    quick: bool, out: Path = ROOT / "docs" / "images", run: Path = ROOT / "runs" / "quickstart"
) -> Iterator[Section]:
    """Draw all pictures. quick: into the folder `quick` below `out`. run: a finished run, left out where it is not."""
    out = out / "quick" if quick else out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, chromium() as browser:
        if run.is_dir():
            draw_run(browser, run, out / "run.png")
        folder = Path(place) / "quickstart"
        make_folder(folder, config={"max_position_embeddings": 4096, "eos_token_id": 1})
        engine = ScriptedEngine(Chat(folder), lambda *_: ENGLISH if "wegnehmen" in engine.prompts[-1] else GERMAN)
        app = create_app(ServerSettings(model=str(folder), port=0, reasoning_language="auto"), engine)
        with running(app) as url:
            for name, (width, height, dark) in PICTURES.items():
                visitor = Visitor(browser, Served(url, engine, app), width=width, height=height, dark=dark)
                visitor.ask("Im Korb sind drei Äpfel, und wir legen noch zwei dazu. Wie viele Äpfel sind es jetzt?")
                visitor.wait_for_end()
                visitor.page.locator(".reasoning summary").click()
                visitor.page.evaluate("scrollTo(0, 0)")
                if name == "dark":
                    visitor.ask("Und wenn wir davon wieder drei Äpfel wegnehmen, wie viele sind dann noch im Korb?")
                    visitor.wait_for_end()
                    visitor.page.locator(".badge summary").last.click()
                    visitor.page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
                visitor.page.screenshot(path=out / f"chat_{name}.png")
                visitor.check()
                visitor.context.close()
                print(f"{out / f'chat_{name}.png'}  {(out / f'chat_{name}.png').stat().st_size // 1024} KiB")
    yield from ()
