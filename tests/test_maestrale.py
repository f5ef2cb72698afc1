"""The command `maestrale` and the package of that name; tests/test_wheel.py has both in an environment of their own."""

import importlib.util
import os
import subprocess
import sys

import pytest

import maestrale
from maestrale import __main__ as command
from shared.errors import STARTED, command_of, python


def asked(monkeypatch, capsys, *words: str) -> tuple[int, str]:
    """Exit code, and what is printed."""
    monkeypatch.setattr(sys, "argv", ["maestrale", *words])
    code = command.main()
    printed = capsys.readouterr()
    return code, printed.out + printed.err


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",)])
def test_the_help_lists_every_command(monkeypatch, capsys, words):
    code, printed = asked(monkeypatch, capsys, *words)
    assert code == 0 and all(f"  {name} " in printed for name in command.COMMANDS)
    assert all(importlib.util.find_spec(each.module) for each in command.COMMANDS.values())


@pytest.mark.parametrize(("typed", "hint"), [
    ("trian", "did you mean 'train'?"), ("eval", "did you mean 'evaluate'?"), ("zzz", "expected one of train, check"),
])  # fmt: skip
def test_a_typing_error_is_told_with_the_nearest_command(monkeypatch, capsys, typed, hint):
    code, printed = asked(monkeypatch, capsys, typed)
    assert code == 2 and hint in printed


def test_the_version_is_that_of_the_package(monkeypatch, capsys):
    assert asked(monkeypatch, capsys, "--version") == (0, f"maestrale {maestrale.__version__}\n")


def test_every_public_name_is_there():
    assert all(getattr(maestrale, name) for name in maestrale.__all__)
    with pytest.raises(AttributeError, match="it has Action, Case"):
        maestrale.Trainer  # noqa: B018


def test_a_package_that_is_not_installed_is_one_line(monkeypatch, capsys):
    def run_module(*_, **__):
        raise ModuleNotFoundError("No module named 'torch'", name="torch.nn")

    monkeypatch.setattr(command.runpy, "run_module", run_module)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    code, printed = asked(monkeypatch, capsys, "train", "quickstart")
    assert code == 2 and "maestrale train needs torch" in printed and ".[cpu] or .[cuda]" in printed


@pytest.mark.parametrize(("program", "said"), [
    ("bin/maestrale", "maestrale"), ("elsewhere/maestrale", "elsewhere/maestrale"),
    ("maestrale/__main__.py", "python -m maestrale"), ("", "python -m"),
])  # fmt: skip
def test_the_next_command_begins_as_the_user_began(monkeypatch, tmp_path, program, said):
    """With `maestrale` of the path or another one, as a module, or with `python -m trainer`."""
    monkeypatch.setattr(command.runpy, "run_module", lambda *_, **__: None)
    monkeypatch.setattr(os, "environ", {**os.environ, "PATH": str(tmp_path / "bin")})
    os.environ.pop(STARTED, None)
    monkeypatch.chdir(tmp_path)
    if program:
        (tmp_path / program).parent.mkdir()
        (tmp_path / program).touch(0o755)
        monkeypatch.setattr(sys, "argv", [str(tmp_path / program), "train", "mine.toml"])
        assert command.main() == 0
    began = {"trainer": "train", "trainer objectives": "objectives", "serve": "serve", "evaluation": "evaluate"}
    for module, word in began.items():
        shown = command_of(module).replace(str(python()), "python")
        assert shown == (f"{said} {word}" if program else f"{said} {module}")
    assert command_of("serve.keys") == f"{python()} -m serve.keys"


@pytest.mark.parametrize("name", command.COMMANDS)
def test_the_help_of_a_command_names_it_as_it_was_typed(monkeypatch, capsys, name):
    def run_module(module: str, **_: object) -> None:
        print(f"usage: python -m {' '.join(sys.argv[1:-1] and [module, *sys.argv[1:-1]] or [module])} [-h]\n"
              "python -m trainer check FILE, python -m trainer.export RUN, python -m serve.keys")  # fmt: skip
        raise SystemExit(0)

    monkeypatch.setattr(command.runpy, "run_module", run_module)
    monkeypatch.setattr(command, "called", lambda: "maestrale")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "argv", ["maestrale", name, "--help"])
    with pytest.raises(SystemExit):
        command.main()
    usage, others = capsys.readouterr().out.splitlines()
    assert usage == f"usage: maestrale {name} [-h]"
    assert others == "maestrale check FILE, python -m trainer.export RUN, python -m serve.keys"


def test_files_of_the_working_folder_take_no_name_of_ours(tmp_path):
    """One that was imported before is an error."""
    for name in ("trainer.py", "shared/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('theirs')\n")
    (tmp_path / "curate").mkdir()

    def run(*arguments: str) -> tuple[int, str]:
        environment = {**os.environ, "PYTHONPATH": str(maestrale.HOME)}
        ended = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        return ended.returncode, ended.stdout + ended.stderr

    code, printed = run("-m", "maestrale", "train", "quickstart", "--nope=1")
    assert code == 2 and "unknown setting nope" in printed and "theirs" not in printed
    hidden = [str(tmp_path / name) for name in ("shared", "trainer.py", "curate")]
    assert printed.startswith(f"maestrale: its own packages hide {', '.join(hidden)}\n")
    assert "verify.plugins\n" in run("-c", "import maestrale, verify.plugins as p; print(p.__name__)")[1]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "script.py").write_text("import maestrale")
    (tmp_path / "elsewhere" / "serve.py").touch()
    assert str(tmp_path / "elsewhere" / "serve.py") in run("elsewhere/script.py")[1], "of the script's folder, too"
    for name in ("shared/__init__.py", "trainer.py"):
        (tmp_path / name).write_text("")
    for name in ("shared", "trainer"):  # a package, a module; a folder without __init__.py gives way by itself
        code, printed = run("-c", f"import {name}, maestrale")
        assert (code, f"a package of maestrale has the name {name}, too" in printed) == (1, True), printed


@pytest.mark.parametrize("words", [
    ("maestrale", "--help"), ("maestrale", "plan", "8b"), ("maestrale", "plan", "--help"), ("maestrale", "objectives"),
    ("lab.plan", "8b"), ("lab.ablate", "configs/ablations/lora.toml", "--list"),
])  # fmt: skip
def test_a_reader_of_a_pipe_that_goes_leaves_no_traceback(words, root):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", *words]
    for unbuffered in ("", "1"):  # the end of the process writes what is left, or each line is written at once
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        ended = subprocess.run(command, cwd=root, env=environment, stdout=write, stderr=subprocess.PIPE, check=False)
        assert ended.stderr == b"" and ended.returncode in {0, 1}
    os.close(write)


def test_every_command_is_run_by_the_one_place_that_knows_closed_pipes(root):
    ends = {
        path.relative_to(root): path.read_text().rpartition("\n    sys.exit(")[2]
        for room in maestrale.ROOMS for path in (root / room).rglob("*.py")
        if "\n    sys.exit(main(" in path.read_text() or "\n    sys.exit(run_command(" in path.read_text()
    }  # fmt: skip
    children = {"trainer/rank_process.py", "trainer/data/generated_problems.py", "trainer/data/data_sets.py"}
    assert len(ends) > 20
    assert {str(path) for path, end in ends.items() if not end.startswith("run_command(")} == children


def test_no_line_of_triton_or_numa_where_there_is_no_card():
    """What vLLM's and torch's C++ say on a CPU; the log of a server shows lines of INFO."""
    program = "import logging, shared, torch; logging.basicConfig(level=logging.INFO)\n"
    program += "from rollout.vllm_config import prepare_environment; prepare_environment()\n"
    program += "import vllm.triton_utils\n"
    program += "import os; print(os.environ['TORCH_CPP_LOG_LEVEL'])\n"
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "Triton" not in ended.stderr and ended.stdout == "ERROR\n"
