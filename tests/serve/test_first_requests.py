"""Fresh engines of the quickstart's model in bfloat16, each with a first request of 1 to 8 prompt tokens; and a request
that kills its engine, through HTTP.

`pytest --soak -n 0 -s tests/serve/test_first_requests.py` runs the first and prints its table. With AMX that is
what crashed; elsewhere it shows that nothing else does.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from serve.app import create_app
from serve.settings import ServerSettings
from tests.rollout.tiny_llama import random_weights, write_model
from tests.serve.command import Command, untrained_model
from tests.serve.conftest import eventually, running
from tests.serve.test_engine_deaths import DEADLY, Mortal
from tests.serve.test_vllm import engine_starts
from tests.shared.test_chat import make_folder

SERVERS, ENGINES = 4, 10
"""servers, and engines of each"""


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_no_engine_dies_of_its_first_request(tmp_path: Path) -> None:
    model = untrained_model(tmp_path)
    print(f"bfloat16, AMX: {torch.cpu._is_amx_tile_supported()}; length of the first prompt of each engine:")
    for number in range(SERVERS):
        command = Command(model, tmp_path / f"log {number}", dtype="bfloat16")
        try:
            for life in range(ENGINES):
                meet(command, life, 1 + (number * ENGINES + life) % 8)
        finally:
            command.close()
    print(f"{SERVERS * ENGINES} engines, as many first requests answered, none died of one")


def meet(command: Command, life: int, length: int) -> None:
    """Give the engine its first request; then kill it and wait for the next one."""
    pid = command.engine().pid
    prompt = [8 + (7 * life + 11 * place) % 190 for place in range(length)]
    reply = command.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8, "temperature": life % 2})
    assert reply.status_code == 200 and reply.json()["usage"]["prompt_tokens"] == length, reply.text
    assert psutil.pid_exists(pid) and engine_starts(command) == life
    print(f"  engine {life + 1:2} of {ENGINES}: {length} tokens", flush=True)
    if life + 1 < ENGINES:
        command.engine().kill()
        eventually(lambda: engine_starts(command) == life + 1 and command.status("/ready") == 200, 200)


@pytest.mark.soak  # in make test: tests/serve/test_engine_deaths.py
@pytest.mark.slow
@pytest.mark.timeout(540)
def test_a_request_that_kills_its_engine_is_an_error_of_its_own(tmp_path: Path) -> None:
    model = Path(make_folder(write_model(tmp_path / "mortal", random_weights(0))))
    engine = Mortal(model)
    app = create_app(ServerSettings(model=str(model), port=0, max_tokens=512), engine)
    with running(app) as url:

        def ask(prompt: list[int]) -> httpx.Response:
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": 450, "temperature": 0}
            return httpx.post(f"{url}/v1/completions", json=body, timeout=300)

        innocent = [[number, 6, 7] for number in range(10, 16)]
        calm = [ask(prompt).json()["choices"] for prompt in innocent]
        with ThreadPoolExecutor(8) as pool:
            under_way = [pool.submit(ask, prompt) for prompt in innocent]
            eventually(lambda: app.state.server.admitted == len(innocent))
            killer, others = ask([DEADLY, 5]), [one.result() for one in under_way]
        assert killer.status_code == 500 and killer.headers["x-should-retry"] == "false"
        assert killer.json()["error"] == {
            "message": "this request was running when the engine died twice; it is not tried again",
            "type": "server_error", "param": None, "code": "engine_killed",
        }  # fmt: skip
        assert [other.status_code for other in others] == [200] * len(innocent), [other.text for other in others]
        assert [other.json()["choices"] for other in others] == calm, "the others have what they have without it"
        deaths = engine.deaths
        eventually(lambda: httpx.get(f"{url}/ready").status_code == 200, 60)
        again = ask([DEADLY, 5])
        assert again.status_code == 500 and engine.deaths == deaths, "sent again it kills no engine"
