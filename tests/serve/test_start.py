"""Starts of a server: what is wrong is told at once, in one line with exit code 2; who has the port, and what clients
hear there before the model has loaded; what is handed to vLLM."""

import asyncio
import json
import shlex
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import torch
from safetensors.torch import save_file

from serve import __main__ as command
from serve import settings, vllm_engine
from serve.__main__ import DrainingServer
from serve.app import create_app, make_engine
from serve.settings import ServerSettings
from shared.chat import Chat
from shared.errors import ConfigError, ModelError
from shared.http_limits import take_address
from tests.rollout.tiny_llama import random_weights, write_model
from tests.serve.conftest import eventually
from tests.serve.fake_engine import ScriptedEngine
from tests.shared.test_chat import make_folder

# ---- mistakes ------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_told_before_the_model_loads(model_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = subprocess.run(
            [sys.executable, "-m", "serve", "--model", model_folder, "--port", str(port)],
            capture_output=True, text=True, timeout=150, cwd=Path(__file__).parents[2],
        )  # fmt: skip
    assert run.returncode == 2 and not run.stdout
    assert run.stderr.startswith(f"error: port = {port}: another program listens at 127.0.0.1:{port}"), run.stderr
    assert run.stderr.count("\n") == 1 and "--port" in run.stderr


@pytest.fixture
def start(monkeypatch, capsys):
    """start(argument, ...): what the command, which must end with exit code 2, says after its first line of a start."""
    with ExitStack() as stack:
        monkeypatch.setattr(command, "take_address", lambda *at: stack.enter_context(take_address(*at)))
        monkeypatch.setattr(command, "clean_logs", lambda: None)  # it is for a process's whole life

        def run(*arguments: str | Path) -> str:
            assert command.main(list(map(str, arguments))) == 2
            lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(("starting", "INFO"))]
            assert len(lines) == 1 and lines[0].startswith("error: "), lines
            return lines[0]

        yield run


def test_addresses_and_settings_that_cannot_be_are_told(model_folder, tmp_path, start, capsys):
    for host in ("192.0.2.1", "no.such.host.invalid"):
        assert f"host = {host}: " in start("--model", model_folder, "--host", host, "--anybody", "--port", "0")
    assert "serve.keys" in start("--model", model_folder, "--host", "0.0.0.0")
    with pytest.raises(ConfigError, match="follow"):
        create_app(ServerSettings(model="some/model-of-the-hub", follow=True))
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    assert "reasoning-language" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_told_with_the_option_of_this_command(tmp_path, start, monkeypatch):
    (tmp_path / "runs" / "there").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    line = start("--model", "runs/nothere", "--port", "0")
    assert "--model = 'runs/nothere'" in line and "did you mean runs/there?" in line and "model.path" not in line


@pytest.mark.parametrize("harm", ["truncated", "no weights", "no config", "a file", "config no JSON", "foreign"])
def test_a_model_that_cannot_be_read_is_told_in_one_line(tmp_path, start, harm):
    folder = Path(make_folder(write_model(tmp_path / "tiny", random_weights(0))))
    weights = folder / "model.safetensors"
    if harm == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif harm == "no weights":
        weights.unlink()
    elif harm == "no config":
        (folder / "config.json").unlink()
    elif harm == "config no JSON":
        (folder / "config.json").write_text("{")
    elif harm == "foreign":
        save_file({name: weight for name, weight in random_weights(0).items() if "layers.2" not in name}, weights)
    line = start("--model", folder if harm != "a file" else weights, "--port", "0")
    assert str(folder) in line and "model.path" not in line and "max_tokens" not in line
    assert harm != "foreign" or "the weights do not fit config.json: lacks model.layers.2." in line


# ---- the port ------------------------------------------------------------------------------------------------------

ALL = ("127.0.0.1", "localhost", "0.0.0.0", "::")
SHARED = [*product(ALL, ALL), ("::1", "::1"), ("::1", "::"), ("::", "::1")]
"""addresses that meet, of which the loopback of IPv6 meets few"""


def bound(host: str, port: int = 0) -> socket.socket:
    """A socket that is bound with SO_REUSEADDR and does not listen yet."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((host, port))
    return made


@pytest.mark.parametrize(("first", "second"), SHARED)
def test_a_port_has_one_owner(first, second):
    with take_address(first, 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^port = {port}: another program listens at .*--port"):
            take_address(second, port)
    take_address(second, port).close()


def test_a_port_is_taken_from_nobody_who_has_bound_it_and_would_listen_later():
    """Sockets that are only bound share a port until one listens, which take_address does at once."""
    with bound("127.0.0.1") as other, take_address("127.0.0.1", other.getsockname()[1]), pytest.raises(OSError):
        other.listen()


def test_a_restart_takes_its_port_while_old_connections_linger():
    with take_address("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            taken.accept()[0].close()  # who closes first is left with TIME_WAIT
            assert client.recv(1) == b""
    with socket.socket() as strict, pytest.raises(OSError, match="in use"):
        strict.bind(("127.0.0.1", port))
    take_address("127.0.0.1", port).close()


# ---- before the model has loaded -------------------------------------------------------------------------------------


class SlowEngine(ScriptedEngine):
    """One that starts when `go` is set, or then fails."""

    def __init__(self, folder: Path, fails: bool = False):
        super().__init__(Chat(folder), lambda *_: "x")
        self.go, self.fails, self.stopped = threading.Event(), fails, False

    async def start(self) -> None:
        while not self.go.is_set():
            await asyncio.sleep(0.01)
        if self.fails:
            raise ModelError("a damaged shard")

    async def stop(self) -> None:
        self.stopped = True


class Starting(NamedTuple):
    """A server as `python -m serve` runs it, whose engine starts when a test says so."""

    engine: SlowEngine
    server: DrainingServer
    client: httpx.Client
    end: Future[None]


@pytest.fixture
def starting(model_folder):
    engine = SlowEngine(model_folder)
    with take_address("127.0.0.1", 0) as address, ThreadPoolExecutor(1) as pool:
        port = address.getsockname()[1]
        settings = ServerSettings(model=str(model_folder), port=port)
        server = DrainingServer(app := create_app(settings, engine), settings)
        command.announce(app.state.server, settings, address)
        end = pool.submit(server.run, sockets=[address])
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            assert client.get("/ready").status_code == 503
            yield Starting(engine, server, client, end)
        server.should_exit = True


def test_a_server_answers_while_its_engine_starts(capsys, starting):
    client = starting.client
    assert client.get("/health").status_code == 200
    reply = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_starting")
    assert int(reply.headers["retry-after"]) > 0
    assert "curl" not in capsys.readouterr().err
    starting.engine.go.set()
    eventually(lambda: client.get("/ready").is_success)
    told: list[str] = []
    eventually(lambda: told.append(capsys.readouterr().err) or "OpenAI(" in "".join(told))  # a moment after it is ready
    lines = "".join(told).splitlines()
    page, curl, openai_client = (
        next(line for line in lines if line.startswith(word)) for word in ("chat page", "curl", "OpenAI")
    )
    assert page == f"chat page: {str(client.base_url).rstrip('/')}/" and client.get("/").is_success
    run = subprocess.run(shlex.split(curl), capture_output=True, text=True, timeout=60)
    assert json.loads(run.stdout)["choices"][0]["message"]["content"] == "x", run
    reached = eval(openai_client, {"OpenAI": openai.OpenAI})
    assert [model.id for model in reached.models.list()] == [starting.server._server.name]


@pytest.mark.parametrize(("host", "url"), [
    ("0.0.0.0", "http://127.0.0.1:"), ("::", "http://[::1]:"), ("::1", "http://[::1]:"),
    ("localhost", "http://localhost:"),
])  # fmt: skip
def test_the_address_that_is_told_is_one_that_can_be_opened(host, url, capsys):
    server = SimpleNamespace(name="tiny")
    with take_address(host, 0) as listening:
        command.announce(server, ServerSettings(host=host, keys="keys.json"), listening)  # type: ignore[arg-type]
        assert capsys.readouterr().err == f"starting tiny at {url}{listening.getsockname()[1]}\n"
        server.on_ready()
    page, curl, openai_client = capsys.readouterr().err.splitlines()
    assert all(url in line for line in (page, curl, openai_client))
    assert "-H 'Authorization: Bearer KEY' -d" in curl and 'api_key="KEY"' in openai_client


def test_a_signal_ends_a_server_whose_engine_starts(starting):
    starting.server.handle_exit(signal.SIGTERM, None)
    starting.end.result(60)
    assert starting.engine.stopped


def test_a_server_whose_engine_does_not_start_ends(model_folder, start, monkeypatch):
    engine = SlowEngine(model_folder, fails=True)
    engine.go.set()
    monkeypatch.setattr("serve.app.make_engine", lambda *_: engine)
    assert start("--model", model_folder, "--port", "0") == "error: a damaged shard" and engine.stopped


# ---- what is handed to vLLM: how it serves a quantised checkpoint is tested in test_vllm_engine.py -------------------


def test_settings_reach_vllm(monkeypatch, tmp_path):
    folder = write_model(tmp_path, random_weights(0))
    monkeypatch.setattr(vllm_engine, "make_vllm_config", lambda *_, **arguments: pytest.fail(json.dumps(arguments)))
    monkeypatch.setitem(sys.modules, "serve.vllm_parts", SimpleNamespace(StepLLM=None, EngineSettings=dict))

    def begin(gpus: int, **values: Any) -> Any:
        """Arguments of make_vllm_config for a server with these settings."""
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        given = settings.load(model=str(folder), **values)
        engine = make_engine(given, folder, 64, {}, SimpleNamespace(chat=SimpleNamespace(stop_ids=[1])))  # type: ignore[arg-type]
        with pytest.raises(pytest.fail.Exception) as handed:
            engine._begin()
        return json.loads(str(handed.value))

    plain = begin(1)
    assert (plain["cache_bytes"], plain["gpu_memory_utilization"], plain["tensor_parallel"]) == (None, 0.92, 1)
    assert "quantization" not in plain
    beside = begin(4, gpu_memory_utilization=0.3, tensor_parallel=4, quantization="fp8", cache_bytes=5)
    assert (beside["cache_bytes"], beside["gpu_memory_utilization"]) == (5, 0.3)
    assert (beside["tensor_parallel"], beside["quantization"]) == (4, "fp8")
    assert "gpu_memory_utilization" not in begin(0)
    with pytest.raises(ConfigError, match="tensor_parallel = 3: this process sees 2 GPUs"):
        begin(2, tensor_parallel=3)
