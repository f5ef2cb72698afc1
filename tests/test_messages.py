"""Every message that the product raises is listed in tests/messages.txt, and changes on purpose."""

from tests import messages

ADVICE = "if that is on purpose: `python -m tests.messages > tests/messages.txt`"


def test_the_messages_are_those_that_are_kept():
    now, kept = messages.listing(), messages.FILE.read_text(encoding="utf-8").splitlines()
    gone, new = [line for line in kept if line not in now], [line for line in now if line not in kept]
    assert now == kept, f"gone: {gone}, new: {new}; {ADVICE}"


def test_a_changed_word_is_a_changed_line(tmp_path):
    source = tmp_path / "changed.py"
    source.write_text(
        "def check(n):\n    if n < 1:\n        raise ValueError(f'steps is {n}: ' 'it must be at least 1')\n"
    )
    assert list(messages.messages(source, tmp_path)) == ["changed.py ValueError: steps is …: it must be at least 1"]
