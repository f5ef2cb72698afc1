"""Python assertions taken apart and edited in place."""

import pytest

from curate.assertions import edit, literal_of, read_code

CODE = """import math
assert f([1, 2], key=(3, 4)) == {5: 'sechs — ü'}  # kept
assert -4.0 == g({1, 2})
assert math.isclose(h(2), 1.5)
assert f(x) == 3
assert f(
    1,
) == [
    2,
]
print('x')
"""


def test_calls_with_literals_are_read():
    statements = read_code(CODE)
    assert [one.call is not None for one in statements] == [True, True, False, False, True]
    first, second = statements[0].call, statements[1].call
    assert first is not None and (first.function, first.args, first.kwargs) == ("f", [[1, 2]], {"key": (3, 4)})
    assert first.expected == {5: "sechs — ü"}
    assert second is not None and (second.args, second.expected) == ([{1, 2}], -4.0)


def test_statements_are_dropped_and_literals_replaced_in_place():
    statements = read_code(CODE)
    changed = edit(CODE, statements, {2, 3}, {0: "{7: 'é'}", 1: "5", 4: "[3]"})
    assert changed == (
        "import math\nassert f([1, 2], key=(3, 4)) == {7: 'é'}  # kept\nassert 5 == g({1, 2})\n"
        "assert f(\n    1,\n) == [3]\nprint('x')\n"
    )
    assert edit(CODE, statements, set(), {}) == CODE


def test_what_cannot_be_edited_is_refused():
    with pytest.raises(ValueError, match="share a line"):
        read_code("assert f(1) == 2; assert f(2) == 3")
    with pytest.raises(ValueError, match="no Python"):
        read_code("assert f(1) ==")
    assert read_code("for x in [1]:\n    assert f(x) == 2\n")[0].call is None


def test_calls_of_the_test_codes_own_functions_are_no_calls_of_the_solution():
    code = "from math import sqrt as root\nimport os.path\ndef check(a):\n    return f(a) == 3\ntwice = f\n"
    code += "assert check(1) == True\nassert root(4) == 2\nassert twice(1) == 2\nassert f(1) == 2\n"
    statements = read_code(code)
    assert [one.call is not None for one in statements] == [False, False, False, True]


def test_lines_are_counted_as_python_counts_them():
    code = "assert f('a\u2028b\x0c') == 1\r\nassert f('c') == 2\rassert f('d') == 3\n"
    assert edit(code, read_code(code), {1}, {2: "4"}) == "assert f('a\u2028b\x0c') == 1\r\nassert f('d') == 4\n"


def test_values_without_a_literal():
    assert literal_of((1, {"a": {2.5}})) == "(1, {'a': {2.5}})"
    assert literal_of(float("inf")) is None and literal_of(float("nan")) is None and literal_of(int) is None
