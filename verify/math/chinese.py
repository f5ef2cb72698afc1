"""Reads Chinese around and inside an answer: frames ("答案是12", "故选B"), numerals ("四分之三", "百分之五十", "十二").

Only whole answers are read as numerals: a numeral inside other words stays a word.
"""

from __future__ import annotations

import re

from verify.math.word_lists import pattern_of

_HAN = re.compile(r"[\u4e00-\u9fff]")
_DIGITS = {character: value for value, character in enumerate("零一二三四五六七八九")} | {"两": 2, "〇": 0}
_PLACES = {"十": 10, "百": 100, "千": 1000}
_NUMERAL = "[零〇一二两三四五六七八九十百千万]+"
_TWO_DIGITS = re.compile("[一二两三四五六七八九][零〇一二两三四五六七八九]|零[零〇]|^[零〇].")
_WHOLE = re.compile(rf"^负?{_NUMERAL}$")
_SHORT = _NUMERAL[:-1] + "{1,12}"
_PART = re.compile(rf"^(负?)({_SHORT}|\d{{1,12}})分之({_SHORT}|\d{{1,12}}(?:\.\d{{1,12}})?)$")
HAN_NAMES = pattern_of("chinese", "nouns")
"""nouns that may stand before an answer"""
_MEASURES = pattern_of("chinese", "measures")
_COUNTED = re.compile(
    rf"^(?:有|共有|一共有)?({_NUMERAL})({_MEASURES}|{pattern_of('chinese', 'further_measures')})"
    r"(?![^半多余几]*[半多余几])([\u4e00-\u9fff]{0,4})$"
)
_FRAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"^(?:所以|因此|故)?(?:最终|正确)?(?:答案|结果)\s*(?:应该是|应为|是|为|:)+\s*", ""),
        (r"^(?:答案)?(?:故选|应选|选项|选择|选)\s*(?:是|为|:)?\s*(?=\(?[A-Z](?:\s*,?\s*[A-Z])*\)?$)", ""),
        (r"^([A-Za-z])\s*的(?:值|取值范围)\s*(?:是|为)\s*", ""),
        (rf"(?<=[\d}})])\s*\(({_MEASURES})\)$", r"\1"),
        (r"根号\s*(\d+|[a-z])", r"\\sqrt{\1}"),
        (r"^([A-Z])\s*(?:选项|项)$", r"\1"),
        (rf"^(?:所求|其|该|此)?(?:函数|直线|抛物线|椭圆|圆|三角形|数列)?的?(?:{HAN_NAMES})\s*(?:为|是|:)\s*:?\s*", ""),
        (r"^每(小时|分钟|天|年|月|周|个|人|秒)(?=[\d$¥])(.+)$", r"\2/\1"),
        (r"充分而不必要", "充分不必要"),
        (r"必要而不充分", "必要不充分"),
        (r"^(?:一共有|一共|共有|共)\s*(?=\d)", ""),
        (r"(?<=\d)\s*又\s*(?=\\frac)", ""),
        (r"\\text\s*\{\s*(或|且|和|与)\s*\}", r"\1"),
        (r"或者", "或"),
        (r"并且|而且", "且"),
    ]  # fmt: skip
]


def _count(numeral: str) -> int:
    """Return the value of a numeral, 二百零五 -> 205, or of digits."""
    if numeral.isdigit():
        return int(numeral)
    total = section = digit = 0
    for character in numeral:
        if character in _DIGITS:
            digit = _DIGITS[character]
        elif character == "万":
            total, section, digit = (total + section + digit) * 10_000, 0, 0
        else:
            section, digit = section + (digit or 1) * _PLACES[character], 0
    return total + section + digit


def spell_chinese(text: str) -> str:
    """Drop frames around an answer and write numerals in digits."""
    if not _HAN.search(text):
        return text
    for pattern, replacement in _FRAMES:
        text = pattern.sub(replacement, text)
    fraction = _PART.match(text)
    if fraction:
        sign = "-" if fraction.group(1) else ""
        if "." in fraction.group(3):
            return f"{sign}{fraction.group(3)}%" if fraction.group(2) in ("百", "100") else text
        if fraction.group(2) in ("百", "100"):
            return f"{sign}{_count(fraction.group(3))}%"
        return rf"{sign}\frac{{{_count(fraction.group(3))}}}{{{_count(fraction.group(2))}}}"
    counted = _COUNTED.match(text)
    if counted and len(text) <= 12 and not _TWO_DIGITS.search(counted.group(1)):
        return f"{_count(counted.group(1))}{counted.group(2)}{counted.group(3)}"
    if len(text) <= 12 and _WHOLE.match(text) and not set(text) <= {"千", "万", "百"} and not _TWO_DIGITS.search(text):
        return ("-" if text.startswith("负") else "") + str(_count(text.lstrip("负")))
    return text
