"""An object in another process: its answers, its errors, its end; stopped while others are measured."""

import asyncio

import psutil
import pytest

from benchmarks.child import Child
from shared.errors import RunError
from tests.benchmarks.stand_ins.echo import Echo


@pytest.mark.slow
def test_a_child_answers_reports_errors_stops_goes_on_and_is_missed_when_it_ends():
    async def story() -> None:
        with Child(Echo, "me") as child:
            assert await child("say", "hello") == "me: hello"
            with pytest.raises(RunError, match=r"(?s)Echo\.fail failed.*ValueError: on purpose"):
                await child("fail")
            process = psutil.Process(await child("pid"))
            child.suspend()
            assert process.status() == psutil.STATUS_STOPPED
            child.resume()
            assert await child("say", "again") == "me: again"
            child.suspend()
        assert not process.is_running(), "the end reaches a stopped process too"
        with Child(Echo, "me") as child, pytest.raises(RunError, match="the process of Echo ended in leave"):
            await child("leave")

    asyncio.run(story())
