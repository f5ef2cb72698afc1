"""The index of rollouts, filters and search; groups, tokens, and completions that become test cases."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from dashboard import growing_file, rollouts
from dashboard.group import TokenDecoder, show_group, show_tokens
from dashboard.rollouts import Rollouts
from dashboard.run_folder import RunFolder
from dashboard.test_case import NoTestCase, write_test
from shared.types import Group
from tests.dashboard.run_folders import episode, write_foreign, write_run
from trainer.data.data_source import write_jsonl

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return RunFolder(write_run(tmp_path_factory.mktemp("runs") / "apples", steps=12, rollouts=4))


def groups_of(run: RunFolder, step: int) -> list[Group]:
    lines = (run.folder / f"rollouts/step_{step}.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Group) for line in lines]


def test_the_index_says_what_is_in_the_file(run):
    assert run.rollouts.steps() == [9, 10, 11, 12]
    for listed, group in zip(run.rollouts.listed(12), groups_of(run, 12), strict=True):
        rewards = [reward for reward in group.rewards if reward is not None]
        assert listed["problem"] == group.prompt.problem.id and listed["completions"] == len(group.completions)
        assert listed["reward"] == pytest.approx(sum(reward.total for reward in rewards) / len(rewards))
        assert listed["tokens"] == sum(len(one.token_ids) for one in group.completions) / len(group.completions)
        for mark in ("correct", "wrong", "no answer"):
            assert listed["marks"].get(mark, 0) == sum(reward.verdict.value == mark for reward in rewards)
        assert listed["marks"].get("cut", 0) == sum(one.finish_reason == "length" for one in group.completions)
        assert listed["marks"].get("mixed language", 0) == sum(reward.consistent is False for reward in rewards)
        assert listed["marks"].get("masked", 0) == sum(not reward.verdict.graded for reward in rewards)


def steps_of(hits: dict[str, Any]) -> list[int]:
    return [hit["step"] for hit in hits["hits"]]


def test_filters_and_search_go_back_from_the_newest_step(run, monkeypatch):
    masked = run.rollouts.search("masked", "", None)
    assert steps_of(masked) == [12, 11, 10, 9] and masked["next"] is None
    assert {hit["problem"] for hit in masked["hits"]} == {"episode-3"}
    assert set(steps_of(run.rollouts.search("correct", "", 11))) == {9, 10}
    assert run.rollouts.search("", "fünf ÄPFEL", None)["hits"][0]["problem"] == "sum-1"
    assert run.rollouts.search("", "no such words", None)["hits"] == []
    monkeypatch.setattr(rollouts, "SEARCH_S", -1.0)  # each request has time for one step
    steps, before = [], None
    for _ in range(4):
        matches = run.rollouts.search("masked", "", before)
        steps += steps_of(matches)
        before = matches["next"]
    assert steps == [12, 11, 10, 9] and before is None


@pytest.mark.parametrize("written", ["Задача École", "задача école", "ЗАДАЧА ÉCOLE"])
@pytest.mark.parametrize("escaped", [False, True])
def test_capitals_of_every_alphabet_do_not_matter(written, escaped, tmp_path):
    line = {"prompt": {"problem": {"text": written}}, "completions": [], "rewards": []}
    (tmp_path / "step_1.jsonl").write_text(json.dumps(line, ensure_ascii=escaped) + "\n")
    for text, hits in (("задача", 1), ("École", 1), ("ЗАДАЧА", 1), ("задачи", 0)):
        assert len(Rollouts(tmp_path).search("", text, None)["hits"]) == hits


def test_a_file_is_indexed_once_and_again_when_it_changes(tmp_path, monkeypatch):
    kept = Rollouts(tmp_path)
    write_jsonl(tmp_path / "step_1.jsonl", [episode(1)])
    first = kept.index(1)
    assert kept.index(1) is first
    write_jsonl(tmp_path / "step_1.jsonl", [episode(1), episode(2)])
    assert len(kept.index(1)) == 2
    monkeypatch.setattr(Rollouts, "MOST_COMPLETIONS", 6)
    for step in range(1, 9):
        write_jsonl(tmp_path / f"step_{step}.jsonl", [episode(step)])
        kept.index(step)
    assert sorted(kept._indexes) == [6, 7, 8], "what is kept is bounded"


def test_a_huge_step_is_indexed_once_and_listed_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(Rollouts, "MOST_COMPLETIONS", 40)
    monkeypatch.setattr(Rollouts, "MOST_OF_A_STEP", 30)
    monkeypatch.setattr(rollouts, "MOST_LISTED", 4)
    write_jsonl(tmp_path / "step_1.jsonl", [episode(number) for number in range(30)])
    write_jsonl(tmp_path / "step_2.jsonl", [episode(1)])
    (tmp_path / "step_3.jsonl").write_bytes(b"\n" * 1000)
    kept = Rollouts(tmp_path)
    first = kept.index(1)
    assert len(first) == 11 and "left out" in first[-1].head, "10 lines of 2 completions, and what tells of the rest"
    kept.index(2)
    assert kept.index(1) is first, "another step does not drop it"
    parts = [[one["line"] for one in kept.listed(1, start)] for start in (0, 4, 8, 12)]
    assert parts == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10], []]
    assert len(kept.search("", "", None)["hits"]) <= 3 * 4
    assert len(kept.index(3)) == 31, "lines that hold nothing are bounded, too"


def test_lines_that_cannot_be_read_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(rollouts, "MOST_BYTES_OF_A_LINE", 2000)
    monkeypatch.setattr(growing_file, "MOST_BYTES_OF_A_LINE", 2000)
    good = msgspec.json.encode(episode(1))
    path = tmp_path / "rollouts/step_1.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"\n".join([b"{", good, b'"' + b"x" * 9000 + b'"', b"[" * 5000, good]) + b"\n" + good[:50])
    run = RunFolder(tmp_path)
    listed = run.rollouts.listed(1)
    assert [one["completions"] for one in listed] == [0, 2, 0, 0, 2], "the last line is not whole yet"
    assert "cannot be read" in listed[0]["head"] and "more than" in listed[2]["head"]
    assert show_group(run, 1, 4)["completions"][1]["verdict"] == "timeout"
    for line in (0, 2, 3, 5, -1):
        with pytest.raises(LookupError):
            show_group(run, 1, line)


def test_links_pipes_and_other_names_are_no_rollouts(tmp_path):
    folder, secret = tmp_path / "rollouts", tmp_path / "secret.jsonl"
    secret.write_text('{"prompt": {"problem": {"text": "secret"}}}\n')
    folder.mkdir()
    (folder / "step_1.jsonl").symlink_to(secret)
    os.mkfifo(folder / "step_2.jsonl")
    (folder / "step_3.jsonl").mkdir()
    for step in (1, 2, 3):
        with pytest.raises(LookupError):
            Rollouts(folder).index(step)
    (tmp_path / "other").symlink_to(folder)
    assert Rollouts(tmp_path / "other").steps() == []


def test_a_group_is_shown_with_every_part_of_its_rewards(run):
    group, shown = groups_of(run, 12)[0], show_group(run, 12, 0)
    assert shown["problem"]["text"] == group.prompt.problem.text and shown["groups"] == 4
    for one, text, reward in zip(shown["completions"], group.texts, group.rewards, strict=True):
        assert reward is not None
        assert one["text"] == text and one["total"] == reward.total and one["reason"] == reward.reason
        assert sum(one["parts"].values()) == pytest.approx(reward.total) and one["versions"] == [10, 11]
    turns = show_group(run, 12, 3)["completions"][0]["turns"]
    assert [turn["role"] for turn in turns] == ["policy", "environment", "policy"] and turns[2]["reward"] == 1.0


def test_tokens_have_their_texts_versions_and_numbers(run):
    group = groups_of(run, 12)[1]
    completion, shown = group.completions[0], show_tokens(run, TokenDecoder(), 12, 1, 0, 0)
    assert "".join(shown["pieces"]) == group.texts[0] and shown["ids"] == completion.token_ids
    half = len(completion.token_ids) // 2
    assert shown["version"] == [10] * half + [11] * (len(completion.token_ids) - half)
    assert shown["columns"] == {"logprobs": completion.logprobs, "teacher": completion.teacher}
    part = show_tokens(run, TokenDecoder(), 12, 1, 0, 5)
    assert part["ids"] == completion.token_ids[5:] and part["pieces"] == shown["pieces"][5:]
    assert show_tokens(run, TokenDecoder(), 12, 3, 0, 0)["version"] == [3, None, None, 3]


def test_long_texts_and_many_tokens_come_in_parts(tmp_path):
    group = episode(1)
    group.turns, group.texts = [], ["x" * 1_000_000, ""]
    group.completions[0].token_ids = list(range(5000))
    group.completions[0].logprobs = [-1.0] * 5000
    (tmp_path / "rollouts").mkdir()
    write_jsonl(tmp_path / "rollouts/step_1.jsonl", [group])
    run = RunFolder(tmp_path)
    text = show_group(run, 1, 0)["completions"][0]["text"]
    assert len(text) < 100_100 and text.endswith("900,000 more characters)")
    shown = show_tokens(run, TokenDecoder(), 1, 0, 0, 4000)
    assert shown["ids"] == list(range(4000, 5000)) and shown["pieces"] is None, "there is no tokenizer"


def test_foreign_records_are_shown_as_far_as_they_go(tmp_path):
    run = RunFolder(write_foreign(tmp_path / "old"))
    listed = run.rollouts.listed(3)
    assert listed[0]["marks"] == {"masked": 1} and [one["completions"] for one in listed[1:]] == [0, 0, 0]
    shown = show_group(run, 3, 1)["completions"]
    assert shown[0]["total"] is None and shown[0]["verdict"] == "right" and shown[1]["tokens"] == 0
    columns = show_tokens(run, TokenDecoder(), 3, 0, 0, 0)["columns"]
    assert columns == {"trainer": [-0.5, -1.0], "logprobs": [-0.4, -1.1]}, "any number of a token can be looked at"
    assert show_group(run, 3, 3)["completions"] == []


def pytest_on(path: Path, *sources: str) -> subprocess.CompletedProcess[str]:
    path.write_text("\n\n".join(sources))
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-pno:randomly", "-pno:cacheprovider", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_completions_paste_into_a_test_that_runs(run, tmp_path):
    """Right, wrong, cut and mixed ones of three problems; a test with a verdict that was changed fails."""
    sources = [write_test(run, 12, line, sample) for line in range(3) for sample in range(8)]
    verdicts = {line.split("'")[1] for source in sources for line in source.splitlines() if "verdict ==" in line}
    assert verdicts == {"correct", "wrong", "no answer"}
    right = next(source for source in sources if "== 'correct'" in source)
    changed = right.replace("== 'correct'", "== 'wrong'").replace("def test_", "def test_changed_")
    done = pytest_on(tmp_path / "test_pasted.py", *sources, changed)
    assert "1 failed, 24 passed" in done.stdout and "answer is right" in done.stdout, done.stdout[-3000:]


def test_hostile_texts_stay_texts_in_a_test_case(run, tmp_path):
    hostile = '"""\nimport os; os.system("touch pwned")\n\'\'\' \\ \u202e \x1b[2J {0} %s </script>'
    group = groups_of(run, 12)[0]
    group.texts[0] = hostile
    problem = replace(group.prompt.problem, id="x(): pass\nimport os #", text=hostile, answer=hostile)
    group.prompt = replace(group.prompt, problem=problem)
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    shutil.copy(run.folder / "config.toml", folder)
    write_jsonl(folder / "rollouts/step_1.jsonl", [group])
    source = write_test(RunFolder(folder), 1, 0, 0)
    seen: dict[str, Any] = {}
    program = source.replace("    reward = score(", "    return problem, completion\n    reward = score(")
    exec(compile(program, "pasted", "exec"), seen)
    pasted = next(value for name, value in seen.items() if name.startswith("test_x_pass_import_os"))
    assert pasted() == (problem, hostile)
    assert "\u202e" not in source and "\x1b" not in source


def test_what_cannot_be_graded_again_says_why(run, tmp_path):
    old = RunFolder(write_foreign(tmp_path / "old"))
    for why, *place in (("environment graded it", run, 12, 3, 0), ("no grade", run, 12, 3, 1),
                        ("another version", old, 3, 0, 0)):  # fmt: skip
        with pytest.raises(NoTestCase, match=why):
            write_test(*place)
