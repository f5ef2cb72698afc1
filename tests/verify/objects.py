"""Python assertions and programs that answer with objects of their own: right (True) or not (False)."""

from __future__ import annotations

F = "assert f(2) == 4\nassert f(3) == 9"
WORD = "assert g('a') == 'aa'\nassert g('') == ''"
TRUTH = "assert h(2)\nassert not h(3)"
NODE = "n = Node(1)\nassert n.val == 1\nassert n.next is None\nm = Node(2, n)\nassert m.next.val == 1"
STACK = (
    "s = Stack()\ns.push(1)\ns.push(2)\nassert len(s) == 2\nassert s.pop() == 2\nassert s.pop() == 1\nassert s.empty()"
)
POINT = (
    "assert Point(1, 2) == Point(1, 2)\nassert Point(1, 2) != Point(2, 1)\nassert (Point(1, 2) + Point(3, 4)).x == 4"
)
LENGTH = "assert len(k(3)) == 3\nassert k(3)[0] == 0\nassert 2 in k(3)\nassert isinstance(k(3), list)"
SORTED = "assert sorted(k([3, 1, 2])) == [1, 2, 3]\nassert all(isinstance(x, int) for x in k([3, 1, 2]))\nassert set(k([1])) == {1}"
CLOSE = "assert abs(f(2) - 4) < 1e-9\nassert f(3) > 8.5 and f(3) < 9.5\nassert round(f(2), 2) == 4"
RAISES = "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass\nassert f(1) == 1"
STR = "assert str(f(2)) == '4'\nassert repr(f(3)) == '9'\nassert f(2) != 5"
PAIR = "a, b = f(2)\nassert a == 4 and b == 8"

_E = "class E:\n    def __eq__(s, o): return True\n    def __ne__(s, o): return True\n    def __bool__(s): return True\n    def __lt__(s, o): return True\n    def __gt__(s, o): return True\n    def __sub__(s, o): return 0\n    def __abs__(s): return 0\n    def __round__(s, n=0): return E()\n    def __len__(s): return 3\n    def __getitem__(s, k): return E()\n    def __contains__(s, o): return True\n    def __iter__(s): return iter([E(), E()])\n    def __hash__(s): return 1\n    def __str__(s): return '4'\n    def __repr__(s): return '9'\n    def __add__(s, o): return E()\n    def __getattr__(s, n): return E()\n    def __call__(s, *a): return E()\n"

_NEAR = "class Z(float): pass\nclass N:\n    def __sub__(s, o): return Z(0.0)\n    __rsub__ = __mod__ = __sub__\n    def __abs__(s): return Z(0.0)\n    def __round__(s, n=0): return Z(4)\n"
EVEN = "assert f(2) % 2 == 0\nassert f(3) - 6 == 0"

FIRST: list[tuple[str, str, bool]] = [
    (F, _E + "def f(x): return E()", False),
    (
        WORD,
        "class S(str):\n    def __eq__(s, o): return True\n    __hash__ = str.__hash__\ndef g(x): return S('')",
        False,
    ),
    (F, "class I(int):\n    def __eq__(s, o): return True\n    __hash__ = int.__hash__\ndef f(x): return I(0)", False),
    (
        F,
        "class M(type):\n    def __eq__(s, o): return True\n    __hash__ = type.__hash__\nclass A(metaclass=M): pass\ndef f(x): return A",
        False,
    ),
    (CLOSE, _E + "def f(x): return E()", False),
    (CLOSE, _NEAR + "def f(x): return N()", False),
    (EVEN, _NEAR + "def f(x): return N()", False),
    (EVEN, "class I(int): pass\ndef f(x): return I(2 * x)", True),
    (LENGTH, _E + "def k(x): return E()", False),
    (SORTED, _E + "def k(x): return E()", False),
    (PAIR, _E + "def f(x): return E()", False),
    (PAIR, _E + "def f(x): return (E(), E())", False),
    (
        F,
        "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.AssertionError = SystemExit\ndef f(x): return 0",
        False,
    ),
    (F, "import sys\nsys.exit(0)\ndef f(x): return x * x", False),
    (F, "import os\nos._exit(0)", False),
    (F, "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x): raise SystemExit(0)", False),
    (F, "import ast\nast.Assert = ast.Pass\ndef f(x): return 0", False),
    (F, "def f(x): print('4'); print('9'); return None", False),
    (F, "from unittest.mock import MagicMock\ndef f(x): return MagicMock()", False),
    (RAISES, "def f(x): raise ValueError", False),
    (RAISES, "def f(x): return 1", False),
    (
        TRUTH,
        "class B:\n    def __init__(s, x): s.x = x\n    def __bool__(s): return s.x\ndef h(x): return B(True)",
        False,
    ),
    (
        STR,
        "class R:\n    def __init__(s, x): s.x = x\n    def __str__(s): return '4'\n    def __repr__(s): return '9'\ndef f(x): return R(x)",
        False,
    ),
    (NODE, "class Node:\n    def __init__(s, val, next=None): s.val = val; s.next = next", True),
    (NODE, "class Node:\n    def __init__(s, val, next=None): s.val = 1; s.next = None", False),
    (NODE, _E + "Node = lambda *a: E()", False),
    (
        STACK,
        "class Stack:\n    def __init__(s): s.v = []\n    def push(s, x): s.v.append(x)\n    def pop(s): return s.v.pop()\n    def empty(s): return not s.v\n    def __len__(s): return len(s.v)",
        True,
    ),
    (STACK, _E + "class Stack(E): pass", False),
    (
        POINT,
        "class Point:\n    def __init__(s, x, y): s.x, s.y = x, y\n    def __eq__(s, o): return (s.x, s.y) == (o.x, o.y)\n    def __add__(s, o): return Point(s.x + o.x, s.y + o.y)",
        True,
    ),
    (
        POINT,
        "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int\n    y: int\n    def __add__(s, o): return Point(s.x + o.x, s.y + o.y)",
        True,
    ),
    (LENGTH, "def k(n): return list(range(n))", True),
    (SORTED, "def k(v): return [*v]", True),
    (RAISES, "def f(x):\n    if x < 0: raise ValueError('negative')\n    return x", True),
    (RAISES, "class Negative(ValueError): pass\ndef f(x):\n    if x < 0: raise Negative\n    return x", True),
    (CLOSE, "def f(x): return float(x * x)", True),
    (TRUTH, "def h(x): return x % 2 == 0", True),
    (PAIR, "from collections import namedtuple\nT = namedtuple('T', 'a b')\ndef f(x): return T(x * x, x ** 3)", True),
    (F, "from enum import IntEnum\nclass N(IntEnum):\n    A = 4\n    B = 9\ndef f(x): return N(x * x)", True),
]

VECTOR = "v = Vec([1, 2])\nassert (v + v).items == [2, 4]\nassert (2 * v).items == [2, 4]\nassert (-v).items == [-1, -2]\nassert v < Vec([9, 9])"
MATRIX = "assert m(2) == [[1, 0], [0, 1]]\nassert m(1)[0][0] == 1\nassert len(m(3)) == 3"
NAMED = "p = where(3)\nassert p.x == 3\nassert p == (3, 4)\nassert p[1] == 4"
DICT = "d = count('aab')\nassert d['a'] == 2\nassert d == {'a': 2, 'b': 1}\nassert 'b' in d"

_VEC = "class Vec:\n    def __init__(s, items): s.items = items\n    def __add__(s, o): return Vec([a + b for a, b in zip(s.items, o.items)])\n    def __rmul__(s, k): return Vec([k * a for a in s.items])\n    def __neg__(s): return Vec([-a for a in s.items])\n    def __lt__(s, o): return s.items < o.items\n"

SECOND: list[tuple[str, str, bool]] = [
    (VECTOR, _VEC, True),
    (VECTOR, _VEC.replace("k * a", "k + a"), False),
    (
        MATRIX,
        "class Matrix(list): pass\ndef m(n): return Matrix([[int(i == j) for j in range(n)] for i in range(n)])",
        True,
    ),
    (
        MATRIX,
        "class Matrix(list):\n    def __eq__(s, o): return True\n    def __getitem__(s, i): return {0: 1}\ndef m(n): return Matrix([0] * 3)",
        False,
    ),
    (
        NAMED,
        "from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\n    y: int\ndef where(n): return P(n, n + 1)",
        True,
    ),
    (
        NAMED,
        "class P(tuple):\n    x = 3\n    def __eq__(s, o): return True\n    def __getitem__(s, i): return 4\ndef where(n): return P((1, 2))",
        False,
    ),
    (
        DICT,
        "class D(dict):\n    def __missing__(s, k): return 0\ndef count(t):\n    d = D()\n    for c in t: d[c] += 1\n    return d",
        True,
    ),
    (
        DICT,
        "class D(dict):\n    def __missing__(s, k): return 2\n    def __eq__(s, o): return True\n    def __contains__(s, o): return True\ndef count(t): return D()",
        False,
    ),
    (
        CLOSE,
        "class X(float):\n    def __sub__(s, o): return X(0)\n    def __abs__(s): return X(0)\n    def __gt__(s, o): return True\n    def __lt__(s, o): return True\ndef f(x): return X(1)",
        False,
    ),
    (CLOSE, "class X(float): pass\ndef f(x): return X(x * x)", True),
    (
        F,
        "class L(int):\n    def __new__(c, v): return int.__new__(c, 0)\n    def __index__(s): return 4\n    def __int__(s): return 4\n    def __add__(s, o): return 4\ndef f(x): return L(4)",
        False,
    ),
    (
        F,
        "from functools import total_ordering\n@total_ordering\nclass T:\n    def __eq__(s, o): return True\n    def __lt__(s, o): return True\ndef f(x): return T()",
        False,
    ),
]
