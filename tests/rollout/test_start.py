"""What holds while an engine process starts."""

import functools
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from types import SimpleNamespace

import pytest
import torch
from vllm.config.logging import LoggingConfig
from vllm.v1.engine.core import EngineCoreProc

from rollout import start
from shared.config import Config
from shared.launch import deaths
from shared.launch.watchdog import STACKS_VARIABLE


def test_an_engine_sees_its_own_gpus_first_and_the_trainers_too(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    with start.own_gpus_first(torch.device("cuda", 1), 2):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,6,4,7"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_the_time_to_start_grows_with_the_model_and_on_gpus(tmp_path):
    """A folder of 2 GB: a checkpoint of it has up to 12, at 200 MB/s a minute."""
    for number in range(2):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(1_000_000_000)
    assert start.with_time_to_start(Config(), tmp_path / "made", False).deadlines.start_s == 300
    assert start.with_time_to_start(Config(), tmp_path, False).deadlines.start_s == 360
    later = start.with_time_to_start(Config.model_validate({"deadlines": {"start_s": 50}}), tmp_path, True)
    assert (later.deadlines.start_s, later.deadlines.step_s) == (50 + 60 + 600, Config().deadlines.step_s)


def test_an_engine_process_that_hangs_at_its_start_is_killed_after_the_deadline_whenever_it_began():
    """A real process of vLLM's name, begun after the deadline, and a wait for it without any, as vLLM's."""
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), name="EngineCore")
    with pytest.raises(TimeoutError, match=r"had not started after 0 s"), start.started_within(0.0):
        time.sleep(0.1)
        process.start()
        process.join()
        raise RuntimeError("Engine core initialization failed")
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(RuntimeError, match="its own reason"), start.started_within(60):
        raise RuntimeError("its own reason")


def dies(*_: object, **__: object) -> None:
    raise NotImplementedError("Unsupported\nCPU attention: head_dim=16\x1b[2J")


def settings_of_an_engine() -> SimpleNamespace:
    """What vLLM reads of its settings before it makes an engine."""
    return SimpleNamespace(
        logging_config=LoggingConfig(),
        parallel_config=SimpleNamespace(data_parallel_size=1, numa_bind=False, reconfigure_for_independent_dp_rank=int),
        model_config=SimpleNamespace(is_moe=False),
    )


@pytest.mark.parametrize("in_a_run", [True, False])
def test_a_dead_engine_says_why_in_one_line_and_its_traceback_is_in_a_file(tmp_path, monkeypatch, capfd, in_a_run):
    """Also when it dies long after its start. Without a run's folder the file lies where temporary files do."""
    monkeypatch.setattr(EngineCoreProc, "__init__", dies)
    monkeypatch.setenv(STACKS_VARIABLE, str(tmp_path)) if in_a_run else monkeypatch.delenv(STACKS_VARIABLE, False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    entry = functools.partial(start.run_engine_core, vllm_config=settings_of_an_engine())
    with start.started_within(60):
        process = multiprocessing.get_context("fork").Process(target=entry, name="EngineCore")
    process.start()
    words = start.last_words()
    assert process.exitcode == 1 and words.startswith("NotImplementedError: Unsupported CPU attention: head_dim=16")
    [file] = tmp_path.iterdir()
    assert words.endswith(f"(its traceback: {file})") and "in dies" in (kept := file.read_text())
    assert "\x1b" not in kept and file.stat().st_mode & 0o77 == 0
    written = capfd.readouterr()
    assert "Traceback" not in written.err + written.out
    assert deaths.how(1, words) == f"ended with exit code 1: {words}"
    with start.started_within(60):
        assert start.last_words() == "", "the words of the one before are no reason of the next"


def test_a_forked_engine_holds_no_connection_and_no_port_of_its_parent():
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    client = socket.create_connection(address)
    ours, _ = server.accept()
    ready, theirs = os.pipe()
    engine = os.fork()
    if engine == 0:
        try:
            start.leave_connections()
            os.write(theirs, b"x" if os.path.samestat(os.fstat(ours.fileno()), os.stat(os.devnull)) else b"closed")
            signal.pause()
        finally:
            os._exit(1)
    try:
        assert os.read(ready, 9) == b"x", "its number stays taken"
        ours.close()
        server.close()
        client.settimeout(300)
        assert client.recv(1) == b"", "the client sees the end"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
    finally:
        os.kill(engine, signal.SIGKILL)
        os.waitpid(engine, 0)
        for one in (ready, theirs):
            os.close(one)
        client.close()
