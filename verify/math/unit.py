r"""Units of measure: names in several languages -> dimensions and an exact factor to one base unit each.

"5 m" is "500 cm", "50 cents" is "$0.50", "12 km/h" is "12 kilometers per hour"; a unit that is not in the table
("apples", "square tiles") stays a name, and equals only itself up to a plural s. Months and years are not converted.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from verify.math.altering import alters


class Unit(NamedTuple):
    """A unit: its dimensions with exponents, sorted by name, and what one such unit is in base units."""

    dimensions: tuple[tuple[str, int], ...]
    factor: Fraction


_TABLE = """
length 1/1000 mm millimeter millimetre millimeters 毫米
length 1/100 cm centimeter centimetre centimeters 厘米 см
length 1/10 dm decimeter 分米
length 1 m meter metre mètre mètres metro metros 米 м
length 1000 km kilometer kilometre 千米 公里 км
length 127/5000 in inch inches
length 381/1250 ft foot feet
length 1143/1250 yd yard
length 201168/125 mi mile miles
time 1/1000 ms millisecond
time 1 s sec second 秒
time 60 min minute 分钟
time 3600 时 h hr hour stunden stunde heure heures hora horas 小时
time 86400 day tag tage jour jours 天
time 604800 week
year 1 year yr 年
mass 1/1000 mg milligram
mass 1 g gram 克
mass 1000 kg kilogram kilo 千克 公斤
mass 1000000 tonne 吨
mass 45359237/100000 lb lbs pound
mass 45359237/1600000 oz ounce
volume 1/1000 ml milliliter millilitre 毫升
volume 1 l liter litre 升
gallon 1 gallon gal
gallon 1/4 quart qt
gallon 1/8 pint pt
gallon 1/16 cup
dollar 1 $ us$ dollar usd buck 美元
dollar 1/100 cent ¢
euro 1 € euro eur 欧元
sterling 1 £ gbp 英镑
yen 1 ¥ yen jpy 日元
yuan 1 元 yuan rmb cny 人民币
yuan 1/10 角
rouble 1 ₽ rouble ruble rub рублей
rupee 1 ₹ rupee inr rs re
australian 1 a$ au$ aud
canadian 1 c$ ca$ cad
franc 1 chf franc
won 1 ₩ won krw
real 1 r$ real reais brl
peso 1 ₱ peso mxn php
zloty 1 zł zloty pln
krona 1 kr krona krone kronor kroner sek nok dkk
lira 1 ₺ lira try
rand 1 rand zar
rupiah 1 rp rupiah idr
ringgit 1 rm ringgit myr
taka 1 taka bdt
shilling 1 ksh shilling
hongkong 1 hk$ hkd
newzealand 1 nz$ nzd
singapore 1 s$ sgd
koruna 1 koruna czk
forint 1 forint huf
dong 1 ₫ dong vnd
baht 1 ฿ baht thb
naira 1 ₦ naira ngn
shekel 1 ₪ shekel ils
hryvnia 1 ₴ hryvnia uah
pakistani 1 pkr
celsius 1 degreec
fahrenheit 1 degreef
amount 1 mol mole
pascal 1 pa pascal
pascal 1000 kpa kilopascal
degree 1 degree deg ° 度
unit 1 unit
mph 1 mph
newton 1 n newton
joule 1 j joule
joule 1000 kj kilojoule
watt 1 w watt
watt 1000 kw kilowatt
ampere 1 a ampere amp
coulomb 1 c coulomb
farad 1 f farad
volt 1 v volt
hertz 1 hz hertz
kelvin 1 k kelvin
"""
_NAMES: dict[str, tuple[str, Fraction]] = {
    name: (row.split()[0], Fraction(row.split()[1])) for row in _TABLE.strip().splitlines() for name in row.split()[2:]
}
_DIMENSIONS = frozenset(dimension for dimension, _ in _NAMES.values())
_IRREGULAR = {"feet": "foot", "inches": "inch", "centi": "cent", "us dollar": "dollar", "us dollars": "dollar"}
_BELOW = re.compile(r"/\s*\(([^()]*)\)")
_PER = re.compile(r"\s*(?:/|\bper\b|每)\s*")
_MEGA = re.compile(r"\bM(?=Pa\b|[WgBbVAJNHL]|$)")  # 5 MW is not 5 mW
_TIMES = re.compile(r"\s*(?:\\cdot|·|\*)\s*")
_PRODUCT = re.compile(r"(?<!square)(?<!cubic)(?<=[\w\d])\s+(?=[^\W\d]+(?:\^|\s|$))(?!per\b)(?<!per )")  # kg m s^-2
_FACTOR = re.compile(
    r"^(square|sq|cubic|cu|平方|立方)?\.?\s*(.+?)(?:\s*\^?\s*(-?[123])|\s+(squared|cubed))?$", re.DOTALL
)
_POWERS = {"square": 2, "sq": 2, "平方": 2, "cubic": 3, "cu": 3, "立方": 3, "squared": 2, "cubed": 3, None: 1}


def _named(name: str) -> tuple[str, Fraction]:
    name = _IRREGULAR.get(name, name)
    for form in (name, name.rstrip("."), name.rstrip("s"), name.rstrip("s.")):
        if form in _NAMES:
            return _NAMES[form]
    return (name.rstrip("s."), Fraction(1))


@lru_cache(maxsize=4096)
def unit(text: str) -> Unit:
    """Read a unit as written ("cm^2", "square feet", "km/h", "apples")."""
    dimensions: dict[str, int] = {}
    factor = Fraction(1)
    text = _MEGA.sub("mega ", text).casefold().strip()
    text = _BELOW.sub(lambda match: "/" + "/".join(re.split(r"[\s*·]+", match.group(1).strip())), text)
    if "^" in text:
        text = _PRODUCT.sub("*", text)
    parts = [(item, index > 0) for index, parts in enumerate(_PER.split(text))
             for item in _TIMES.split(parts)]  # fmt: skip
    for item, below in parts:
        match = _FACTOR.match(item.strip())
        if match is None:
            continue
        before, name, digit, after = match.groups()
        power = int(digit) if digit else _POWERS[after] if after else _POWERS[before]
        dimension, size = _named(name.strip())
        power = -power if below else power
        dimensions[dimension] = dimensions.get(dimension, 0) + power
        factor *= size**power
    if dimensions == {"mph": 1}:
        return Unit((("length", 1), ("time", -1)), Fraction(201168, 125) / 3600)
    if dimensions.get("volume"):  # a liter is a cubic decimeter
        power = dimensions.pop("volume")
        dimensions["length"] = dimensions.get("length", 0) + 3 * power
        factor *= Fraction(1, 1000) ** power
    return Unit(tuple(sorted(dimensions.items())), factor)


_WORDS = re.compile(r"^[^\W\d_]+(?:[ /.-]+[^\W\d_]+){0,2}$")
_VOWEL = re.compile(r"[aeiouyàâäáéèêëíîïóôöúùûü]", re.IGNORECASE)


def is_forgivable(text: str) -> bool:
    """Return whether a unit may be missing on the other side: a known one, or words for things ("apples", "个").

    Words that change a value or deny it ("squared", "fifths", "or six": `altering.py`), and letters that are a product
    ("abc"), may not.
    """
    text = text.strip(" .,()\"'")
    if not text or is_known(text):
        return True
    if not _WORDS.match(text):
        return False
    words = re.split(r"[ /.-]+", text)
    return not alters(words) and all(_names_things(word.casefold()) for word in words)


def _names_things(word: str) -> bool:
    """Return whether a word may name things that are counted, as far as its letters tell."""
    if not word.isascii() or word in ("per", "of", "the", "a"):
        return True
    function = any(word[:-1] == name for name in ("sin", "cos", "tan", "log", "ln", "sqrt"))  # cosx
    in_a_row = word in "abcdefghijklmnopqrstuvwxyz"
    return len(word) >= 3 and bool(_VOWEL.search(word)) and not function and not in_a_row


def is_known(text: str) -> bool:
    """Return whether every part of a unit is in the table."""
    read = unit(text)
    return bool(read.dimensions) and all(dimension in _DIMENSIONS for dimension, _ in read.dimensions)
