"""The environment and the agent of the documentation work as they stand there, and every environment is listed with its
options, by its page and by `python -m environments`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from environments.__main__ import main
from environments.environment import ENVIRONMENTS, Action, load_ready
from environments.host import EnvironmentHost
from shared.environment_settings import EnvironmentSettings
from shared.sections import RewardWeights
from shared.types import Problem
from tests.environments.agents import action, agent, play, program
from tests.environments.test_tools import no_grade

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


def ready() -> list[str]:
    load_ready()
    return sorted(name for name, known in ENVIRONMENTS.items() if Path(known.home).parent.name == "environments")


def first_program(page: Path) -> str:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0]


async def test_the_environment_of_the_page_runs(tmp_path):
    (tmp_path / "rooms.py").write_text(first_program(PAGE), encoding="utf-8")
    host = EnvironmentHost(EnvironmentSettings(plugins=[str(tmp_path / "rooms.py")]), RewardWeights(), no_grade)
    try:
        await host.start(["parity"])
        for index, words in enumerate((["even", "odd"], ["maybe", "maybe"])):
            [message] = (await host.reset((0, index), Problem("1", "?", "", environment="parity"), 5, 30)).messages
            word = words[int(re.findall(r"\d+", message.text)[0]) % 2]
            ended = await host.step((0, index), Action(word, word), 30)
            assert ended.done and ended.reward == 1.0 - index
    finally:
        await host.end()


async def test_the_agent_of_its_page_runs(tmp_path):
    code = first_program(PAGE.parent / "environments" / "agent.md")
    async with agent(command=program(tmp_path, code)) as episode:
        first, second, end = await play(episode, [action("<think>a</think>4"), action("5")])
    assert [message.text for message in first.messages] == ["2 + 3 = ?"]
    assert [message.text for message in second.messages] == ["No. Try again."]
    assert (end.reward, end.solved, end.done) == (1.0, True, True)


@pytest.mark.parametrize("name", ready())
def test_every_ready_environment_has_a_page_with_its_options(name):
    page = (PAGE.parent / "environments" / f"{name}.md").read_text(encoding="utf-8")
    assert f"environments/{name}.md" in PAGE.read_text(encoding="utf-8")
    for option in ENVIRONMENTS[name].make.Options.model_fields:
        shared = option == "result_characters" and f"`{option}`" not in page  # told by the page of all tools
        assert shared or f"`{option}`" in page, f"{name}.md does not tell the option {option}"


def test_every_environment_and_every_option_is_listed(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    heads = [line for line in text.splitlines() if line and not line.startswith(" ")]
    assert heads == sorted(ENVIRONMENTS) and {"guess", "retry"} <= set(heads)
    for known in ENVIRONMENTS.values():
        for option, field in known.make.Options.model_fields.items():
            assert f"    environment.options.{known.name}.{option}" in text
            assert field.description, f"{known.name}.{option} has no docstring"
    numbers = "    environment.options.guess.numbers = 16\n        the number is from 1 to this (a whole number, at"
    assert numbers in text and "environment.options.search.corpus  (needed)" in text and "<class" not in text


def test_plug_in_files_are_listed_too_and_what_is_wrong_is_told(tmp_path):
    def run(text: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "mine.py").write_text(text)
        command = [sys.executable, "-m", "environments", str(tmp_path / "mine.py")]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    head = "from environments.environment import Environment, environment\n"
    listed = run(f'{head}@environment("parity")\nclass Parity(Environment):\n    """Odd or even."""\n')
    assert listed.returncode == 0 and "parity\n    Odd or even. (gives the reward itself)\n" in listed.stdout
    failed = run("1 / 0\n")
    assert failed.returncode == 2 and "ZeroDivisionError" in failed.stderr and "Traceback" not in failed.stderr
