r"""Gives answers that are written alike one spelling: unicode, LaTeX layout, brackets, wrappers, spaces.

Only spelling: values are never computed here, and nothing that could change a value is dropped (units, bases, signs and
brackets stay). Every pass is linear; callers bound the length first (`extract.within_limits`).
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from functools import lru_cache

from verify.math.brackets import decimal_commas, french_brackets
from verify.math.chinese import spell_chinese
from verify.math.dress import undressed
from verify.math.english import spell_english
from verify.math.unit import is_known

_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "0123456789+-()n")
_SUBSCRIPT = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-")
_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∙": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\leq ", "⩽": r"\leq ", "≥": r"\geq ", "⩾": r"\geq ",
    "≠": r"\neq ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "∈": r"\in ", "°": r"^\circ ",
    "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "λ": r"\lambda ", "φ": r"\phi ", "ω": r"\omega ", "…": r"\ldots ",
    "º": r"^\circ ", "˚": r"^\circ ", "∛": r"\sqrt[3]", "∖": r"\setminus ", "∧": r"\land ", "∨": r"\lor ",
    "∣": "|", "≈": r"\approx ", "≃": r"\approx ",
    "⟨": "(", "⟩": ")", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ",
    "⌉": r"\rceil ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ", "μ": r"\mu ", "ρ": r"\rho ",
    "σ": r"\sigma ", "τ": r"\tau ", "ψ": r"\psi ", "Δ": r"\Delta ", "Σ": r"\Sigma ", "Ω": r"\Omega ",
    "Γ": r"\Gamma ", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}", "℃": r"^\circ C", "“": "",
    "”": "", "«": "", "»": "", "《": "", "》": "", "‰": r"\permil ", "∓": r"\mp ", "∗": "*",
    "≡": r"\equiv ",
    "∠": r"\angle ", "△": r"\triangle ", "⊥": r"\perp ", "∥": r"\parallel ", "⊂": r"\subset ", "⊆": r"\subseteq ",
    "′": "'", "’": "'", "、": ",", "。": ".", "：": ":", "∶": ":", "【": "[", "】": "]", "「": "", "」": "", "⁄": "/",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "→": r"\to ", "＝": "=", "％": "%", "＄": "$",
}  # fmt: skip
MAX_SPELLED = 4_000
"""characters; callers bound the length before unicode is spelled out"""
_FONTS = (
    "mathrm|mathbf|mathit|mathsf|mathtt|mathnormal|boldsymbol|pmb|bm|operatorname|textbf|textit|textsf|texttt|emph|underline"
    "|fbox|mathop|mathord|mathbin|mathopen|mathclose|ensuremath"
)
_NEGATIVE = "[Mm]inus|[Nn]egative|[Mm]oins|[Mm]enos|[Mm]eno|[Мм]инус|负"
_SO = r"(?:(?:[Ss]o|[Tt]hus|[Hh]ence|[Tt]herefore),?\s+)"
_COUNTING = (
    rf"{_SO}|{_SO}?(?:(?:[Tt]here\s+(?:are|is|were|will\s+be)|[Ii]t\s+is|[Ww]e\s+(?:get|have|obtain|find)(?:\s+that)?|[Ee]quals|[Ee]qual\s+to|[Oo]nly|[Bb]oth"
    r"|(?:[Hh]e|[Ss]he|[Tt]hey|[Ww]e|[Yy]ou|[Ii]t)\s+(?:has|have|needs?|gets?|pays?|spends?|earns?|makes?|takes?|costs?))"
    r"(?:\s+(?:exactly|precisely|only|a\s+total\s+of))?|[Ee]xactly|[Pp]recisely|[Aa]\s+total\s+of|[Ee]xactement"
    r"|[Ii]l\s+y\s+(?:en\s+)?a|[Gg]enau|[Ee]s\s+gibt|[Ee]s\s+sind|[Ee]xactamente|[Hh]ay|[Ee]sattamente|[Cc]i\s+sono|[Рр]овно"
    r"|[Вв]сего|恰有|恰好有?|共计|等于)"
)
"""words before a number that leave it what it is"""
_COUNT = r"(?:\{(\d+|\d*[nmkNr](?:\s*[-+]\s*\d)?)\}|([nmkNr]|\d+))"
_TAKEN = r"(?:\{(\d+|[a-z](?:\s*[-+]\s*\d)?)\}|([a-z]|\d+))"
_ITEM = r"-?\d+(?:[./]\d+)?"
_UNIT_WORD = r"\\text\s*\{\s*([^{}]*?)\s*\}\s*(\^\s*\{?\d\}?)?"
_SPACES = "q?quad|enspace|enskip|thinspace|medspace|thickspace"
_NESTED = re.compile(rf"\\(?:{_FONTS})\s*\{{")
_POWER = re.compile(r"^[^{}]*\^\s*\{-?\d\}$")
_FRACTION = re.compile(r"[¼-¾⅐-⅞]")

_RULES: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r",\s*\\!\s*", ","),
        (r"\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge|bfseries)(?![A-Za-z])", " "),
        (r"[_^]\s*\{\s*\}(?!\s*[_^]?\{?\w*\}?\s*[CPA]\b)|\s*\\(?:square|blacksquare|Box|qed)(?![A-Za-z])\s*$", ""),
        (r"^(\d+)\s*(?:\^\s*)?\{?\s*(?:\\(?:text|mathrm|textrm)\s*\{\s*)?(?:st|nd|rd|th)\s*\}{0,2}$", r"\1"),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"√\s*(\d+(?:\.\d+)?|[A-Za-z])", r"\\sqrt{\1}"),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|rm|bf|it)(?![A-Za-z])", " "),
        (r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|big|Big|bigg|Bigg|middle)(?![A-Za-z])\.?", ""),
        (r"(?<![\d.])0\{,\}(?=\d)", "0."),
        (r"(?<=\d)\s*(?:\\[,; ]|\{,\}|~)\s*(?=\d{3}(?!\d))", ""),
        (r"(?<=\d)\{,\}(?=\d)", "."),
        (r"(?<![\d.,])([1-9]\d{0,2})\.(\d{3})\.(\d{3})(?:\.(\d{3}))?(?![\d.])", r"\1\2\3\4"),
        (r"\\!", ""),
        (r"(?<!\\)\\[()\[\]]", " "),
        (rf"(?<!\\)\\[,;: ]|\\(?:{_SPACES})(?![A-Za-z])|~|\\hspace\{{[^{{}}]*\}}", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
        (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\(?:color|textcolor)\s*\{[^{}]*\}", " "),
        (r"\\([ij])math(?![A-Za-z])", r"\1"),
        (r"\\bar\s*\{?([A-Za-z0-9])\}?", r"\\overline{\1}"),
        (r"√\s*\{", r"\\sqrt{"),
        (r"\\pounds(?![A-Za-z])", "£"),
        (r"\\euro(?![A-Za-z])", "€"),
        (
            r"\\text\s*\{\s*((?:US|A|C|HK|NZ|S|R)?\s?\\?\$|[€£¥₹]|[A-Z]{3}(?<=USD|EUR|GBP|RMB|CNY|JPY|INR|AUD|CAD|CHF|NZD|HKD|SGD)|Rs\.?)\s*(\d[\d.,]*)?\s*\}",
            r"\1 \2",
        ),
        (r"\\text\s*\{\s*(lcm|gcd|cis|max|min|det|Var|Cov|rank|tr|dim|ker)\s*\}", r"\1 "),
        (r"\\text\s*\{\s*\^\s*\\circ\s*([CF]?)\s*\}", r"^\\circ \1"),
        (r"(?:\^\s*\{?\s*\\circ\s*\}?\s*)?\\text\s*\{\s*(?:degrees?)?\s*(C|F)(?:elsius|ahrenheit)\s*\}", r"^\\circ \1"),
        (r"(?<=[\d}])\s*(?:\^\s*\{?\s*\\circ\s*\}?\s*|degrees?\s+)(C|F)(?:elsius|ahrenheit)$", r"^\\circ \1"),
        (r"\\text\s*\{\s*([,;])\s*(and|or)?\s*\}", r"\1 "),
        (r"^\\text\s*\{\s*\(?([a-h])\)\s*\}$", r"(\1)"),
        (r"^\\text\s*\{\s*([A-Za-z]\s*=\s*[^{}=]{1,60}(?:(?:[,;]|and|or)\s*[A-Za-z]\s*=[^{}=]{1,60}){0,5})\}$", r"\1"),
        (
            r"(?<=[\d})])\s*(?:\\text\s*\{\s*\(?(?:only|in total|in all|altogether|exactly)\)?\s*\}"
            r"|\(only\)|only|in total|altogether)\s*$",
            "",
        ),
        (rf"^(?:\\text\s*\{{\s*)?(?:{_COUNTING})\s*:?\s*\}}?\s*(?=[-$\d]|\\frac|\\sqrt|\\pi|[A-Za-z]\s*=)", ""),
        (r"^(?:Réponse|Antwort|Lösung|Respuesta|Risposta|Resposta|Ответ|답|정답|答え?|答案)\s*:\s*(?=\S)", ""),
        (r"^\\text\s*\{\s*(?:[Tt]he\s+)?(?:final\s+)?[Aa]nswer(?:\s+is)?\s*:?\s*\}", ""),
        (r"^\$([^$]*\\[^$]*)\$(?=[ \\A-Za-z])", r"\1 "),
        (r"(\\mathbb\{[RCZQ]\})\s*[-−]?\s*(?=\\\{)", r"\1\\setminus "),
        (r"(\\(?:setminus|backslash)(?![A-Za-z]))\s*\{([^{}]*)\}", r"\1\\{\2\\}"),
        (r"\\mathbb\{Z\}\s*/\s*\(?(\d+|[a-z])\)?\s*(?:\\mathbb\{Z\}|Z)?", r"\\mathbb{Z}_{\1}"),
        (r"\\mathcal\s*\{?\s*O\s*\}?(?=\s*\()", "O"),
        (r"\^\s*\{?\s*\\(?:top|intercal)(?![A-Za-z])\s*\}?", "^T"),
        (r"\\(?:begin|end)\s*\{(?:align|aligned|equation|gather|gathered|split|multline|math)\*?\}", " "),
        (r"&\s*(?==)", ""),
        (r",\s*&", " &"),
        (r"(?:\\\\\s*)+$", ""),
        (r"\\text\s*\{\s*(?:[Ii]nfinity|inf)\s*\}|(?<![A-Za-z\\])(?:[Ii]nfinity|inf)(?![A-Za-z])", r"\\infty "),
        (r"\\pmod\s*\{((?:[^{}]|\{[^{}]*\})*)\}", r"(mod \1)"),
        (r"\\pmod\s*(\w)", r"(mod \1)"),
        (r"\(\s*(?:\\bmod|\\mod|\\text\s*\{\s*mod\s*\}|mod)(?![A-Za-z])\s*([^()]*)\)", r"(mod \1)"),
        (r"\\mod(?![A-Za-z])\s*(\w+)$", r"(mod \1)"),
        (r"(?<=\d)\{\.\}(?=\d)", "."),
        (rf"^(?:\\text\s*\{{\s*)?(?:{_NEGATIVE})\s*\}}?\s*(?=[\d$€£¥.]|\\frac)", "-"),
        (r"\\phantom\s*(?:\{[^{}]*\}|\S)", ""),
        (r"\\(?:[lr][vV]ert|Vert)(?![A-Za-z])|(?<!\\)\\\|", "|"),
        (r"\\big(cup|cap)(?![A-Za-z])(?!\s*_)", r"\\\1"),
        (r"\\overrightarrow(?![A-Za-z])", r"\\vec"),
        (r"\\(max|min)\s*\\\{([^{}]*)\\\}", r"\\\1(\2)"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"^\\text\s*\{\s*([A-Z0-9(),;\s.+-]*[A-Z0-9(),;+-][A-Z0-9(),;\s.+-]*)\}$", r"\1"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*\\text\s*\{\s*([CF])\s*\}", r"^\\circ \1"),
        (rf"([\^_])\s*\\(?:{_FONTS})\s*\{{([^{{}}]*)\}}", r"\1{\2}"),
        (rf"(\\[A-Za-z]+)\\(?:{_FONTS})\s*\{{([^{{}}]*)\}}", r"\1 \2"),
        (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
        (r"\\(?:mathrm|text)\s*\{([^{}]*)\^\s*\{(-?\d)\}\s*\}", r"\\text{\1^\2}"),
        (rf"\\(?:{_FONTS})\s*\{{([^{{}}]*)\}}", r"\1"),
        (r"\\(?:textrm|mbox|hbox|textnormal)\s*\{", r"\\text{"),
        (r"\\text\s*\{([^{}\d]+)\}\s*\\cdot\s*\\text\s*\{([^{}\d]+)\}\s*\^\s*\{?(-?\d)\}?", r"\\text{\1*\2^\3}"),
        (
            r"\\text\s*\{\s*([A-Za-z]{1,3})\s*\}\s*\\text\s*\{\s*([A-Za-z]{1,3})\s*\}\s*\^\s*\{?(-\d)\}?",
            r"\\text{\1*\2^\3}",
        ),
        (
            r"\\text\s*\{\s*([^{}]*?)\s*\}\s*\^\s*\{?(-\d)\}?\s*\\text\s*\{\s*([A-Za-z]{1,3})\s*\}\s*\^\s*\{?(-?\d)\}?",
            r"\\text{\1^\2*\3^\4}",
        ),
        (
            r"\\text\s*\{([^{}\d]+)\}\s*/\s*\(\s*\\text\s*\{([^{}\d]+)\}\s*(?:\\cdot|\*)?\s*\\text\s*\{([^{}\d]+)\}\s*\)",
            r"\\text{\1/(\2*\3)}",
        ),
        (r"\\text\s*\{\s*,?\s*(and|or|And|Or)\s*,?\s*\}", r" \1 "),
        (r"^(\d+)\s*(?:\\text\s*\{\s*to\s*\}|to)\s*(\d+)$", r"\1:\2"),
        (r"(?<=[\d}])\s*/\s*\\text\s*\{\s*", r"\\text{ per "),
        (r"\\text\s*\{([^{}]*)\}\s*\\text\s*\{\s*per ", r"\\text{\1 per "),
        (rf"\\frac\s*\{{\s*([\d.,]+)\s*{_UNIT_WORD}\s*\}}\s*\{{\s*{_UNIT_WORD}\s*\}}", r"\1\\text{\2\3 per \4\5}"),
        (r"([\^_])\s*\\infty(?![A-Za-z])\s*", r"\1{\\infty}"),
        (r"_\s*\{\s*\\text\s*\{\s*([A-Za-z]+)\s*\}\s*\}", r"_{\1}"),
        (rf"\\[dt]?frac\s*\{{\s*{_UNIT_WORD}\s*\}}\s*\{{\s*{_UNIT_WORD}\s*\}}", r"\\text{\1\2 per \3\4}"),
        (r"\\[sn]icefrac(?![A-Za-z])|\\sfrac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:qty|SI)\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1\\text{ \2}"),
        (r"\\(?:num|unit)\s*\{([^{}]*)\}", r"\1"),
        (r"\\(?:tag|label)\*?\s*\{[^{}]*\}|\\(?:nonumber|notag|hfill)(?![A-Za-z])", ""),
        (r"\\(?:under|over)(?:brace|line)\s*\{([^{}]*)\}\s*_\s*\{[^{}]*\}", r"\1"),
        (r"\\(?:lbrace|lcub)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace|rcub)(?![A-Za-z])", r"\\}"),
        (r"\\(?:lbrack)(?![A-Za-z])", "["),
        (r"\\(?:rbrack)(?![A-Za-z])", "]"),
        (r"\\(?:le|leqslant)(?![A-Za-z])|<=", r"\\leq "),
        (r"\\(?:ge|geqslant)(?![A-Za-z])|>=", r"\\geq "),
        (r"\\ne(?![A-Za-z])|\\not\s*=", r"\\neq "),
        (r"\\(?:mathdollar|textdollar)(?![A-Za-z])", "$"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:varnothing|empty)(?![A-Za-z])", r"\\emptyset "),
        (r"\\(?:ast|star)(?![A-Za-z])", "*"),
        (r"\\(?:dots|cdots)(?![A-Za-z])|\.\.\.", r"\\ldots "),
        (r"(?<!\\)\\([%$#&])", r"\1"),
        (r"\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)(?![A-Za-z]))|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"(?<=\d)\s*\{(\\frac\s*\{\d+\}\s*\{\d+\})\}", r"\1"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d|[A-Za-z])", r"\1{\2}"),
        (r"\\sqrt\s*(\d|[A-Za-z])", r"\\sqrt{\1}"),
        (r"\*\*", "^"),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
        (r"\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", r"\\overline{\1\2\3}"),
        (r"(\d*\.\d*)\\(?:dot|overline|bar)\s*\{?(\d)\}?$", r"\1\\overline{\2}"),
        (r"(?<![\d.])(\d+\.\d*)\((\d{1,12})\)$", r"\1\\overline{\2}"),
        (r"(?<![\d.])(\d*\.\d*?)(\d{1,6}?)\2{2,}\s*\\ldots\s*$", r"\1\\overline{\2}"),
        (r"^\s*(?:the\s+)?(?:final\s+)?(?:[Aa]nswer|ANSWER)(?:\s+is|\s*:)\s*:?\s*", ""),
    ]
]
_EARLY: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(vec|hat|overline)\s+([A-Za-z])(?![A-Za-z])", r"\\\1{\2}"),
        (r"(?<=[\d.])\\bar\s*\{(\d+)\}", r"\\overline{\1}"),
        (r"[Cc]entigrade", "Celsius"),
        (rf"^\\text\s*\{{\s*({_ITEM}(?:(?:\s*,|\s+and|\s+or)+\s*{_ITEM})+)\s*\}}$", r"\1"),
        (r'^\\text\s*\{\s*"([^"{}A-Za-z]*)"\s*\}$|^\\text\s*\{([^{}A-Za-z]*\d[^{}A-Za-z]*) only\s*\}$', r"\1\2"),
        (rf"^\\text\s*\{{\s*(?:{_COUNTING})\s+(\\?\$?\d[\d,.]*)((?: [a-z]+)*)\s*\}}$", r"\1\\text{\2}"),
        (r"^(-?\d+)\s*(?:\\text\s*\{\s*and a half\s*\}|and a half)$", r"\1\\frac{1}{2}"),
        (r"^(-?\d+)\s*(?:\\text\s*\{\s*and a quarter\s*\}|and a quarter)$", r"\1\\frac{1}{4}"),
        (r"\\text\s*\{\s*,?\s*(?:as well as|along with)\s*\}", " and "),
    ]
]
"""before the rules, for text that `_MARKS` names"""
_MARKS = ("\\text", "\\bar", "\\vec", "\\hat", "\\over", "and a ", "entigrade")
_CHOSEN: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (rf"(?:\{{\}}|^|(?<=[-+*=(\s]))\s*[_^]{_COUNT}\s*C_{_TAKEN}", r"\\binom{\1\2}{\3\4}"),
        (rf"(?:\{{\}}|^|(?<=[-+*=(\s]))\s*[_^]{_COUNT}\s*P_{_TAKEN}", r"P(\1\2,\3\4)"),
        (rf"(?<![A-Za-z\\])C_(?!\{{?\d+\}}?\s*\^){_COUNT}\s*\^\s*{_TAKEN}", r"\\binom{\1\2}{\3\4}"),
        (rf"(?<![A-Za-z\\])C\s*\^\s*{_TAKEN}\s*_\s*(?!1\b|\{{1\}}){_COUNT}", r"\\binom{\3\4}{\1\2}"),
        (r"(?<![A-Za-z\\])A_\{?([nm])\}?\s*\^\s*\{?(\d|[kmr])\}?", r"P(\1,\2)"),
    ]
]
"""combinations and permutations, after the rules"""
_LINES = re.compile(
    r"(?:\\left\s*\\(?:\{|lbrace)\s*)?\\begin\s*\{(?:d?cases|array\}\s*\{[lcr]|aligned)\}((?=[^&]*[=<>])[^&]*?)(?:\\\\)?"
    r"\s*\\end\s*\{(?:d?cases|array|aligned)\}(?:\s*\\right\s*\.)?"
)
_DOLLARS = re.compile(r"^\$\$?(.*?)(?<!\\)\$\$?$", re.DOTALL)
_OPEN_DOLLAR = re.compile(r"(?<!\\)\$")
_SPACE = re.compile(r"\s+")
_LOOSE_SPACE = re.compile(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])|(?<=\d) (?=[A-Za-z])")
_SINGLE = re.compile(r"([\^_])\{(\w)\}(?!\w)")
_BOLD = re.compile(r"^(\*\*|__|\*|`)([^*_`]+)\1$")
_BARE_SET = re.compile(r"^\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}$", re.DOTALL)
_PER = re.compile(r"(?<=\d)\s*/\s*([a-z]{3,12})$")
_MINUTES = re.compile(r"^(\d{1,4})\s*\^\\circ\s*(\d{1,2})\s*'(?:\s*(\d{1,2})\s*(?:''|\"))?$")
_CIRCLED = re.compile(r"[①-⑳](?:[\s,，、和]*[①-⑳])*")
_CIRCLED_PARTS = re.compile(r"^①(?:\\[ ,;]|\\q?quad|[\s:.])*(?:[-+\d$(]|\\(?:frac|sqrt|pi))[^①-⑳]+②")
_TRAILING = " \t\n.,;:。"
_EXCLAMATION = re.compile(r"(?:(?<![A-Za-z\\])[A-Za-z]{3,}|\\text\s*\{[^{}]*\})\s*!$")


def _listed(match: re.Match[str]) -> str:
    """Write circled numbers, which name statements in China, as a list, never as the digits of one number."""
    return ", ".join(unicodedata.normalize("NFKC", sign) for sign in match.group() if _CIRCLED.match(sign))


def _per(match: re.Match[str]) -> str:
    """Write the "/" of $12/hour as "per"; 5/abc stays a quotient."""
    return f" per {match.group(1)}" if is_known(match.group(1)) else match.group()


def _degrees(match: re.Match[str]) -> str:
    """Write degrees, minutes and seconds as an exact fraction: 7^\\circ 30' is 7.5^\\circ."""
    degrees, minutes, seconds = match.groups()
    return rf"\frac{{{(int(degrees) * 60 + int(minutes)) * 60 + int(seconds or 0)}}}{{3600}}^\circ"


def _fraction_words(match: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", match.group()).partition("⁄")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _rows(match: re.Match[str]) -> str:
    r"""Write the rows of \begin{cases} without conditions, which all hold, as a list."""
    return ", ".join(row.strip().rstrip(",;") for row in re.split(r"\\\\(?:\[[^\]]*\])?", match.group(1)))


def _unwrapped(text: str) -> str:
    r"""Remove fonts around what holds braces itself: \boldsymbol{\frac{1}{2}}. Others are left to the rules."""
    match = _NESTED.search(text)
    while match:
        level, end = 1, match.end()
        while end < len(text) and level:
            level += (text[end] == "{") - (text[end] == "}")
            end += 1
        inside = text[match.end() : end - 1]
        if level == 0 and "{" in inside and not _POWER.match(inside):
            argument = text[: match.start()].rstrip()[-1:] in tuple("^_}")
            text = text[: match.start()] + (f"{{{inside}}}" if argument else inside) + text[end:]
            match = _NESTED.search(text, match.start())
        else:
            match = _NESTED.search(text, match.end())
    return text


def _spell_unicode(text: str) -> str:
    text = text.encode("utf-8", "ignore").decode("utf-8")
    text = "".join(c if c.isprintable() else (" " if c.isspace() else "") for c in text)
    if _CIRCLED_PARTS.match(text):
        text = re.sub("[①-⑳]", lambda sign: f" ({unicodedata.normalize('NFKC', sign.group())}) ", text).strip()
    text = _CIRCLED.sub(_listed, text)
    text = re.sub("(?:\\d\u0305)+", lambda m: "\\overline{" + m.group().replace("\u0305", "") + "}", text)
    text = re.sub("(\\d)\u0307", r"\\dot{\1}", text)
    text = _FRACTION.sub(_fraction_words, text)
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ]+", lambda m: "^{" + m.group().translate(_SUPERSCRIPT) + "}", text)
    text = re.sub(r"[₀₁₂₃₄₅₆₇₈₉₊₋]+", lambda m: "_{" + m.group().translate(_SUBSCRIPT) + "}", text)
    for symbol, spelled in _SYMBOLS.items():
        if symbol in text:
            text = text.replace(symbol, spelled)
    return unicodedata.normalize("NFKC", text)


@lru_cache(maxsize=8192)
def normalise(text: str) -> str:
    r"""Return the one spelling of an answer, e.g. "$\dfrac12$ ." -> "\frac{1}{2}".

    Idempotent for what it knows; unknown LaTeX stays as it is.
    """
    text = text.strip()
    if text.isascii() and text.isdigit():
        return text
    text = _BOLD.sub(r"\2", undressed(text).strip())
    if not text.isascii() or not text.isprintable():
        spelled = _spell_unicode(text)
        if len(spelled) > MAX_SPELLED:
            return text  # signs that stand for many characters each: compared as they are
        text = spelled
    inner = _DOLLARS.match(text.rstrip(_TRAILING))
    if inner and not _OPEN_DOLLAR.search(inner.group(1)):
        text = inner.group(1)
    text = _LINES.sub(_rows, _unwrapped(text))
    early = _EARLY if any(map(text.__contains__, _MARKS)) else []
    chosen = _CHOSEN if "C" in text or "P" in text or "A_" in text else []
    for pattern, replacement in itertools.chain(early, _RULES, chosen):
        text = pattern.sub(replacement, text)
    text = decimal_commas(french_brackets(text))
    text = _PER.sub(_per, text)
    text = _SPACE.sub(" ", _MINUTES.sub(_degrees, text)).strip()
    text = text.rstrip(_TRAILING)
    text = spell_english(spell_chinese(text))
    if text.startswith("{") and ("," in text or "|" in text or "\\mid" in text):
        text = _BARE_SET.sub(r"\\{\1\\}", text)
    while _EXCLAMATION.search(text):
        text = text[:-1].rstrip(_TRAILING)
    return text


def spelling_key(text: str) -> str:
    """Return normalised text without the spaces that carry no meaning; equal keys mean the same answer."""
    return _SINGLE.sub(r"\1\2", _LOOSE_SPACE.sub("", normalise(text)))
