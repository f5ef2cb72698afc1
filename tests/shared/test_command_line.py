"""A wrong option is one line, with the nearest that there is, for every command of `maestrale`."""

from collections.abc import Callable

import pytest

from curate.__main__ import main as curate
from dashboard.__main__ import main as dashboard
from evaluation.__main__ import main as evaluate
from lab.ablate.__main__ import main as ablate
from serve.__main__ import main as serve
from shared.errors import run_command
from verify.__main__ import main as verify


@pytest.mark.parametrize(("main", "arguments", "line"), [
    (evaluate, ["rows.jsonl", "--limt", "3"], "--limt: unknown option; did you mean --limit?"),
    (evaluate, ["--qqq=1"], "--qqq: unknown option (python -m evaluation --help lists all)"),
    (serve, ["--prot", "8000"], "--prot: unknown option; did you mean --port?"),
    (dashboard, ["runs", "--prot=1"], "--prot: unknown option; did you mean --port?"),
    (curate, ["format", "a", "--out", "b", "--restrt"], "--restrt: unknown option; did you mean --restart?"),
    (ablate, ["a.toml", "--seds", "3"], "--seds: unknown option; did you mean --seeds?"),
    (verify, ["a.jsonl"], "the following arguments are required: --out (python -m verify --help lists all)"),
])  # fmt: skip
def test_a_wrong_option_is_one_line(main: Callable[[list[str]], int], arguments, line, capsys):
    try:
        code = run_command(lambda: main(arguments))
    except SystemExit as end:
        code = int(str(end.code))
    assert (code, capsys.readouterr().err) == (2, f"error: {line}\n")
