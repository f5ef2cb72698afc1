"""The mask of letters by hand, and as a mask of tokens.

A line of letter_mask.jsonl is a text in a language: what passes, and foreign words behind it that are stopped.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

from serve.letter_mask import LetterMask, MaskRequest, has_letters_of_its_own, reasoning_mask, scripts_of
from serve.token_mask import TokenMask
from shared.chat import Chat
from shared.reasoning_tags import CONTROL, FAMILIES, TEXT, Tags
from tests.tables import read_table
from verify.language import known_languages, spoken_in
from verify.scripts import NOT_LATIN

ROWS = read_table("serve/letter_mask")


def passed(code, text, opened=True, tags=TEXT):
    """The beginning of a text that the mask lets through."""
    mask = LetterMask(MaskRequest(sorted(scripts_of(code)), tags, [], [], [1], True, opened))
    state = mask.start
    for place, character in enumerate(text):
        state = mask.step(state, mask.symbol(character))
        if state is None:
            return text[:place]
    return text


def allows(mask, place, token):
    """Whether a token may come there."""
    return bool(mask.row(place)[token // 32] >> token % 32 & 1)


def test_what_belongs_to_the_language_passes_and_foreign_words_are_stopped_within_four_letters():
    for row in ROWS:
        before, foreign = row["passes"], row["stopped"]
        rest = passed(row["language"], before + foreign)
        assert rest.startswith(before) and len(rest) - len(before) < max(min(4, len(foreign)), 1), row


def test_the_mask_agrees_with_the_detector():
    for code in known_languages():
        assert has_letters_of_its_own(code) is (code in NOT_LATIN), code
    assert scripts_of("ja") == {"Hani", "Hira", "Kana"} and scripts_of("kk") == {"Cyrl", "Latn"}
    for row in ROWS:
        if not row["stopped"] and row["language"] in NOT_LATIN:
            assert spoken_in(row["passes"].partition("</think>")[0], row["language"])[1] is not False, row


@pytest.mark.parametrize(("text", "stopped"), [
    ("<think>Привет the", "<think>Привет t"), (" \n<think>Hello there", " \n<think>H"),
    *((text, text) for text in ("Hello, the answer is five.", "<thin ice is thin", "<think>Да</think> The answer.")),
])  # fmt: skip
def test_an_answer_without_reasoning_is_free(text, stopped):
    rest = passed("ru", text, opened=False)
    assert rest.startswith(stopped) and (stopped == text) is (rest == text)


def test_tokens_may_cut_letters_anywhere(model_folder):
    chat = Chat(model_folder)
    values = {code: reasoning_mask(code, chat, TEXT, opened=True).value for code in ("ru", "uk", "en", "de")}
    request = MaskRequest.read(values["ru"])
    assert request is not None and MaskRequest.read("start: x") is None
    assert (dict(request.begin), request.close_ids, request.end_ids) == ({5: len("<think>")}, [6], [1])
    assert [value == values["ru"] for value in values.values()] == [True, True, False, False]
    # П is D0 9F, р is D1 80, é is C3 A9, 中 is E4 B8 AD, and the apostrophe E2 80 99
    tokens = [b"", b"<eos>", b"\xd0", b"\x9f", b"\xd1\x80", b"\x9f\xd1", b"\xc3", b"\xe4\xb8", b"\xad", b"\xe2",
              b"\x80\x99", b"\xff", b"the", b"\xd0\x9fa", b"</thi", b"nk> yes", b"\xe2\x80",
              b"\x99", b"\x80"]  # fmt: skip
    mask = TokenMask(request._replace(begin=[], close_ids=[0], end_ids=[1]), tokens)

    def allowed(*before):
        state = mask.start
        for token in before:
            state = mask.advance(state, token)
        return {text for token, text in enumerate(tokens) if allows(mask, state, token)}

    ends = {b"", b"<eos>"}
    text = {b"\xd0", b"\xd1\x80", b"\xc3", b"\xe2", b"\xd0\x9fa", b"</thi", b"\xe2\x80"}
    assert allowed() == ends | text, "C3 may become the sign of times, E4 B8 only a Han character"
    single = {b"\x9f", b"\x80", b"\x99", b"\xad"}
    assert allowed(2) == allowed(2, 5) == ends | single | {b"\x9f\xd1"}, "the second letter is cut too"
    assert allowed(9) == ends | single | {b"\x80\x99"} and allowed(16) == ends | single | {b"\x9f\xd1"}
    assert allowed(13) >= {b"\xd0"} and b"the" not in allowed(13)
    assert allowed(14) == ends | {b"nk> yes"}, "a closing tag that has begun comes to its end"
    assert allowed(14, 15) == set(tokens) == allowed(0), "behind it everything is free"


def test_control_tokens_open_and_close_the_reasoning():
    tokens = [b"the", b"", b"", b"", "да".encode(), b"[/THINK]"]
    mask = TokenMask(MaskRequest(["Cyrl"], CONTROL, [(2, 7)], [3], [1], False, False), tokens)
    inside = mask.advance(mask.start, 2)
    assert [allows(mask, inside, token) for token in range(6)] == [False, True, False, True, True, True]
    assert not allows(mask, mask.advance(inside, 5), 0), "its letters are no tag"
    assert allows(mask, mask.advance(inside, 3), 0) and allows(mask, mask.advance(mask.start, 0), 0)


def test_tags_beyond_ascii_close_the_reasoning():
    kimi = Tags("◁think▷", "◁/think▷")
    for opened, text in ((True, "Да◁/think▷ The answer"), (False, "◁think▷Да◁/think▷ The answer")):
        assert passed("ru", text, opened, kimi) == text
        assert passed("ru", text.replace("/", ""), opened, kimi) != text.replace("/", "")
    tokens = ["◁/th".encode(), b"ink", b"\xe2\x96", b"\xb7", b"the"]
    mask = TokenMask(MaskRequest(["Cyrl"], kimi, [], [], [], True, True), tokens)
    state = mask.start
    for token in range(4):
        assert allows(mask, state, token) and not allows(mask, state, 4), tokens[token]
        state = mask.advance(state, token)
    assert allows(mask, state, 4), "the tag was cut into bytes, and is whole"


def test_an_opening_tag_may_be_a_control_token_and_letters():
    request = MaskRequest(["Cyrl"], FAMILIES[0], [(0, len("<|channel>"))], [1], [], True, False)
    mask = TokenMask(request, [b"", b"", b"thought", b"\n", b"the"])
    place = mask.start
    for token in (0, 2, 3):
        place = mask.advance(place, token)
    assert not allows(mask, place, 4) and allows(mask, place, 1)


def test_threads_that_fill_one_batch_take_turns(monkeypatch):
    """vLLM fills the rows of large batches in several threads, and a new row gives numbers to new places."""
    letters = "аbB1 $`\\α(\n{"
    tokens = ["".join(token).encode() for size in (1, 2, 3) for token in product(letters, repeat=size)]
    mask, busy = TokenMask(MaskRequest(["Cyrl"], TEXT, [], [], [], True, True), tokens), threading.Lock()
    compute = mask._compute

    def compute_alone(number):
        assert busy.acquire(blocking=False), "another thread is at it"
        row = compute(number)
        busy.release()
        return row

    monkeypatch.setattr(mask, "_compute", compute_alone)
    numbers = [mask.advance(mask.start, token) for token in range(len(letters))]
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(mask.row, numbers))
    assert all(torch.equal(row, compute(number)) for row, number in zip(rows, numbers, strict=True))
