"""Whatever agents, MCP servers and plug-ins have started ends with the controller, however that ends."""

import os
import select
import subprocess
import sys

import pytest

SCRIPT = """
exec 9>{line}
setsid sleep 1000 &
printf x >&9
sleep 1000
"""
PLUGIN = """
import subprocess
from environments.environment import Environment, environment

@environment("starts")
class Starts(Environment):
    async def reset(self, problem, seed):
        self.line = open("{line}", "w")
        subprocess.run(["bash", "{script}"])
"""
CONTROLLER = """
import asyncio, sys
from environments.host import EnvironmentHost
from shared.environment_settings import EnvironmentSettings
from shared.sections import RewardWeights
from shared.types import Problem
name, script, plugin = sys.argv[1:]
settings = {"options": {name: {"command": f"bash {script}"}}} if name != "starts" else {"plugins": [plugin]}
async def main():
    host = EnvironmentHost(EnvironmentSettings(**settings), RewardWeights(), None)
    await host.start(["starts"] if name == "starts" else [])
    await host.reset((0, 0), Problem("a", "q", "1", environment=name), 1, 1000.0)
asyncio.run(main())
"""


@pytest.mark.parametrize("name", ["agent", "mcp", "starts"])
def test_what_a_command_or_a_plugin_starts_ends_with_the_controller(tmp_path, name, root):
    """A process in a session of its own, below a shell, and that of a plug-in; all of them hold one end of a pipe."""
    line, script, plugin = tmp_path / "line", tmp_path / "run.sh", tmp_path / "plugin.py"
    os.mkfifo(line)
    script.write_text(SCRIPT.format(line=line))
    plugin.write_text(PLUGIN.format(script=script, line=line))
    command = [sys.executable, "-c", CONTROLLER, name, str(script), str(plugin)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(root)}) as controller:
        reader = os.open(line, os.O_RDONLY)
        try:
            assert os.read(reader, 1) == b"x"
            controller.kill()
            assert select.select([reader], [], [], 120)[0] and os.read(reader, 1) == b""
        finally:
            controller.kill()
            os.close(reader)
