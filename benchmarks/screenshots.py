"""Pictures of the chat page for docs/serving.md; nothing in them is a measurement.

Needs Chromium and the dev extra. The engine says a text that is written here, so that the pictures show everything the
page can show.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import ROOT, Section, benchmark
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


@benchmark(page="docs/images")
def screenshots(quick: bool, out: Path = ROOT / "docs" / "images") -> Iterator[Section]:
    """Draw all pictures. quick: into the folder `quick` below `out`."""
    out = out / "quick" if quick else out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, chromium() as browser:
        folder = Path(place) / "quickstart"
        make_folder(folder, config={"max_position_embeddings": 4096, "eos_token_id": 1})
        engine = ScriptedEngine(Chat(folder), lambda *_: ENGLISH if "wegnehmen" in engine.prompts[-1] else GERMAN)
        app = create_app(ServerSettings(model=str(folder), port=0, reasoning_language="auto"), engine)
        with running(app) as url:
            for name, (width, height, dark) in PICTURES.items():
                visitor = Visitor(browser, Served(url, engine, app.state.server), width=width, height=height, dark=dark)
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
