"""The mask of letters by hand, and as a mask of tokens."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch

from serve.letter_mask import LetterMask, MaskRequest, has_letters_of_its_own, reasoning_mask, scripts_of
from serve.token_mask import TokenMask
from shared.chat import Chat
from shared.reasoning_tags import CONTROL, FAMILIES, TEXT, Tags
from verify.language import known_languages, spoken_in
from verify.scripts import NOT_LATIN


def passed(code: str, text: str, opened: bool = True, tags: Tags = TEXT) -> str:
    """The beginning of a text that the mask lets through."""
    mask = LetterMask(MaskRequest(sorted(scripts_of(code)), tags, [], [], [1], True, opened))
    state = mask.start
    for place, character in enumerate(text):
        after = mask.step(state, mask.symbol(character))
        if after is None:
            return text[:place]
        state = after
    return text


UNTOUCHED = [
    ("ru", "Сначала сложим: 3 + 2 = 5, затем умножим на 4."),
    ("ru", r"Пусть x = 5 и y = 2x + 3ab. Тогда $x + y = \frac{18}{1}$."),
    ("ru", "Том прошёл 5 km за 2 h, то есть 2.5 km/h, и ещё 30cm."),
    ("ru", "Anna, Bob и Carl Friedrich Gauss пришли к John Smith."),
    ("ru", "Anna: 5, Bob: 7, Carl: 3, Dora: 2, Emil: 9."),
    ("ru", r"Ответ: \boxed{42 apples and \text{three {nested} pears}}. Готово."),
    ("ru", "Код: `total = sum(prices)` даёт сумму."),
    ("ru", "Вот так:\n```python\nfor item in basket:\n    print(item)\n```\nГотово."),
    ("ru", r"По формуле \(speed = distance / time\) получаем 5."),
    ("ru", r"Значит, \[ \text{total cost} = 5 \cdot 3 \] верно."),
    ("ru", "Цена $5 за штуку, всего $15, а скидка 5$."),
    ("ru", "В NASA и CERN используют iPhone, eBay и LaTeX."),
    ("ru", "Треугольник ABC, сторона AB = 5 см, угол α = 30°, pH 7."),
    ("ru", "Да</think> The answer is five."),
    ("ru", "Пусть 𝑥 ∈ ℝ и 𝐴 = 5 ℃, ⓐ ряд ℵ₀, ℹ️ Итак"),
    ("el", "Άρα λxy = 5."),
    ("ru", "Площадь S = πr² ≈ 3.14 × 4, объём V."),
    ("ru", "$$\nspeed = 5\n$$\nЗначит, пять."),
    ("ru", r"\begin{align*} x &= \eta \\ y &= 3 \end{align*} Итак"),
    ("ru", "`незаконченный код</think>I am free now"),
    ("zh", "小明有3个苹果，又买了2个，一共是3 + 2 = 5个。"),
    ("zh", "使用Python计算，速度是5km，单位是km。\n\n所以答案是\\boxed{13}。"),
    ("yue", "佢有三個蘋果，而家有幾多個？"),
    ("ja", "りんごは3個です。トムはコーヒーを5杯飲みました。ｘ＝５"),
    ("ko", "사과가 3개 있고 2개를 더 삽니다. 答은 5입니다."),
    ("ar", "لدى توم 3 تفاحات، ثم اشترى 2. المجموع هو ٥."),
    ("fa", "تام ۳ سیب دارد و ۲ سیب دیگر می‌خرد."),
    ("hi", "टॉम के पास 3 सेब हैं। वह 2 और खरीदता है।"),
    ("el", "Ο Τομ έχει 3 μήλα και x = 5."),
    ("he", "לתום יש 3 תפוחים. הוא קונה עוד 2."),
    ("th", "ทอมมีแอปเปิล 3 ผล ซื้อเพิ่ม 2 ผล"),
    ("ka", "ტომს აქვს 3 ვაშლი."),
    ("uk", "Том має 3 яблука і ще 2 — разом п’ять."),
    ("sr", "Tom ima 3 jabuke. Том има 3 јабуке."),
    ("de", "Tom hat drei Äpfel, α = 30°, und Δx ≈ 3,14 🙂."),
    ("fr", r"Réfléchissons : 3 + 2 = 5, où $\Omega$ est l'ensemble."),
    ("vi", "Tôm có 3 quả táo, mua thêm 2 quả nữa."),
]
STOPPED = [
    ("ru", "The ", "answer is five."), ("ru", "", "I am sure"), ("ru", "", "the"), ("ru", "", "小明有3个"),
    ("ru", "Сначала 3 + 2, ", "so the answer"), ("ru", "Есть ", "apples"), ("ru", "Есть 5 ", "apples"),
    ("ru", "Tom Has Three ", "Apples"), ("ru", "Ответ $5 ", "and the total"), ("ru", "$the ", "answer is five$"),
    ("ru", "t h e a ", "n s w e r"), ("ru", "THE ANSWER IS ", "FIVE"), ("ru", "T-The-Answer-Is-", "Five"),
    ("ru", "TheAnswerIs", "Five"), ("ru", "прав", "αααα"), ("ru", "Текст: \\text{", "the answer}"),
    ("ru", "быстро", "ly"), ("uk", "точно", "ness"), ("hi", "तेज", "ing"), ("ar", "سرعة", "ing"), ("ru", "", "𝐢𝐫𝐬𝐭 𝐰𝐞"),
    ("ru", "", "ⓣⓗⓔ ⓐⓝⓢⓦⓔⓡ"), ("ru", "", "𝓽𝓱𝓮"), ("zh", "首先", "𝚝𝚑𝚎𝚗 𝚠𝚎"),
    ("zh", "首先 ", "we need"), ("zh", "", "Сначала"), ("zh", "OK, So Let ", "Me Think"), ("ja", "まず", "the number"),
    ("ko", "먼저 ", "let us"), ("ko", "", "りんご"), ("ar", "", "the answer"), ("hi", "Tom के पास ", "apples"),
    ("de", "", "Ответ пять"), ("de", "Die Antwort: ", "答案是5"), ("de", "Tom hat 3 ", "яблока"),
    ("en", "", "这个问题"), ("en", "Let us ", "σκεφτούμε"), ("sr", "Том ", "有3个苹果"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "text"), UNTOUCHED)
def test_what_belongs_to_the_language_passes(code: str, text: str) -> None:
    assert passed(code, text) == text


@pytest.mark.parametrize(("code", "before", "foreign"), STOPPED)
def test_foreign_words_are_stopped_within_four_letters(code: str, before: str, foreign: str) -> None:
    rest = passed(code, before + foreign)
    assert rest.startswith(before) and len(rest) < len(before) + min(4, len(foreign)), rest


def test_the_scripts_are_those_that_the_detector_allows() -> None:
    for code in known_languages():
        assert has_letters_of_its_own(code) is (code in NOT_LATIN), code
    assert scripts_of("ja") == {"Hani", "Hira", "Kana"} and scripts_of("kk") == {"Cyrl", "Latn"}


def test_what_the_mask_lets_through_is_no_other_language_for_the_detector() -> None:
    for code, text in UNTOUCHED[:-4]:  # the rest are in Latin letters, Serbian in both
        assert spoken_in(text.partition("</think>")[0], code)[1] is not False, text


@pytest.mark.parametrize(
    ("text", "stopped"),
    [
        ("<think>Привет the", "<think>Привет t"),
        (" \n<think>Hello there", " \n<think>H"),
        ("Hello, the answer is five.", ""),
        ("<thin ice is thin", ""),
        ("<think>Да</think> The answer is five.", ""),
    ],
)
def test_an_answer_without_reasoning_is_free(text: str, stopped: str) -> None:
    assert passed("ru", text, opened=False).startswith(stopped or text)
    assert bool(stopped) is (passed("ru", text, opened=False) != text)


def test_tokens_may_cut_letters_anywhere(model_folder: Path) -> None:
    chat = Chat(model_folder)
    request = MaskRequest.read(reasoning_mask("ru", chat, TEXT, opened=True).value)
    assert request is not None and MaskRequest.read("start: x") is None
    assert (dict(request.begin), request.close_ids, request.end_ids) == ({5: len("<think>")}, [6], [1])
    alike = (reasoning_mask(code, chat, TEXT, opened=True) for code in ("uk", "en", "de"))
    assert [made.value == reasoning_mask("ru", chat, TEXT, opened=True).value for made in alike] == [True, False, False]
    # П is D0 9F, р is D1 80, é is C3 A9, 中 is E4 B8 AD, and the apostrophe E2 80 99
    tokens = [b"", b"<eos>", b"\xd0", b"\x9f", b"\xd1\x80", b"\x9f\xd1", b"\xc3", b"\xe4\xb8", b"\xad", b"\xe2",
              b"\x80\x99", b"\xff", b"the", b"\xd0\x9fa", b"</thi", b"nk> yes", b"\xe2\x80",
              b"\x99", b"\x80"]  # fmt: skip
    mask = TokenMask(request._replace(begin=[], close_ids=[0], end_ids=[1]), tokens)

    def allowed(*before: int) -> set[bytes]:
        number = mask.start
        for token in before:
            number = mask.advance(number, token)
        row = mask.row(number).tolist()
        return {token for place, token in enumerate(tokens) if row[place // 32] >> place % 32 & 1}

    ends = {b"", b"<eos>"}
    text = {b"\xd0", b"\xd1\x80", b"\xc3", b"\xe2", b"\xd0\x9fa", b"</thi", b"\xe2\x80"}
    assert allowed() == ends | text, "C3 may become the sign of times, E4 B8 only a Han character"
    one = {b"\x9f", b"\x80", b"\x99", b"\xad"}
    assert allowed(2) == allowed(2, 5) == ends | one | {b"\x9f\xd1"}, "the second letter is cut too"
    assert allowed(9) == ends | one | {b"\x80\x99"} and allowed(16) == ends | one | {b"\x9f\xd1"}
    assert allowed(13) >= {b"\xd0"} and b"the" not in allowed(13)
    assert allowed(14) == ends | {b"nk> yes"}, "a closing tag that has begun comes to its end"
    assert allowed(14, 15) == set(tokens) == allowed(0), "behind it everything is free"


def test_control_tokens_open_and_close_the_reasoning() -> None:
    request = MaskRequest(["Cyrl"], CONTROL, [(2, 7)], [3], [1], False, False)
    tokens = [b"the", b"", b"", b"", "да".encode(), b"[/THINK]"]
    mask = TokenMask(request, tokens)
    inside = mask.advance(mask.start, 2)
    bits = int(mask.row(inside)[0])
    assert [bits >> place & 1 for place in range(6)] == [0, 1, 0, 1, 1, 1]
    assert int(mask.row(mask.advance(inside, 5))[0]) & 1 == 0, "its letters are no tag"
    assert int(mask.row(mask.advance(inside, 3))[0]) & 1 == int(mask.row(mask.advance(mask.start, 0))[0]) & 1 == 1


def test_tags_beyond_ascii_close_the_reasoning() -> None:
    kimi = Tags("◁think▷", "◁/think▷")
    for opened, text in ((True, "Да◁/think▷ The answer"), (False, "◁think▷Да◁/think▷ The answer")):
        assert passed("ru", text, opened, kimi) == text
        assert passed("ru", text.replace("/", ""), opened, kimi) != text.replace("/", "")
    tokens = ["◁/th".encode(), b"ink", b"\xe2\x96", b"\xb7", b"the"]
    mask = TokenMask(MaskRequest(["Cyrl"], kimi, [], [], [], True, True), tokens)
    place = mask.start
    for number in range(4):
        assert int(mask.row(place)[0]) >> number & 1, tokens[number]
        assert not int(mask.row(place)[0]) >> 4 & 1
        place = mask.advance(place, number)
    assert int(mask.row(place)[0]) >> 4 & 1, "the tag was cut into bytes, and is whole"


def test_an_opening_tag_may_be_a_control_token_and_letters() -> None:
    request = MaskRequest(["Cyrl"], FAMILIES[0], [(0, len("<|channel>"))], [1], [], True, False)
    mask = TokenMask(request, [b"", b"", b"thought", b"\n", b"the"])
    place = mask.start
    for token in (0, 2, 3):
        place = mask.advance(place, token)
    assert not int(mask.row(place)[0]) >> 4 & 1 and int(mask.row(place)[0]) >> 1 & 1


def test_threads_that_fill_one_batch_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM fills the rows of large batches in several threads, and a new row gives numbers to new places."""
    letters = "аbB1 $`\\α(\n{"
    tokens = ["".join(token).encode() for size in (1, 2, 3) for token in product(letters, repeat=size)]
    mask, busy = TokenMask(MaskRequest(["Cyrl"], TEXT, [], [], [], True, True), tokens), threading.Lock()
    compute = mask._compute

    def compute_alone(number: int) -> torch.Tensor:
        assert busy.acquire(blocking=False), "another thread is at it"
        row = compute(number)
        busy.release()
        return row

    monkeypatch.setattr(mask, "_compute", compute_alone)
    numbers = [mask.advance(mask.start, token) for token in range(len(letters))]
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(mask.row, numbers))
    assert all(torch.equal(row, compute(number)) for row, number in zip(rows, numbers, strict=True))
