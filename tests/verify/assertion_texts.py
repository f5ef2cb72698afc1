"""Python test code as data sets have it, with a program that is right and one that is wrong, by kind.

`ROWS`: (kind, tests, right, wrong). `UNVERIFIABLE`: (tests, program): nobody can say.
`CHEATS`: (tests, program): none is correct. `REFUSED`: (tests, words of the error): no program can be graded by them, which is said when they are read.
"""

from __future__ import annotations

from typing import Any

DOUBLE, SAME = "def f(x): return 2 * x", "def f(x): return x"
RAISING = "def f(x):\n    if x < 0: raise ValueError('negative')\n    return 2 * x"
BROKEN = "def f(x): return 1 // 0"
_CASE = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(3), 6)\n"
BODY = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        "
_BOX = "class Box:\n    def __init__(self, a): self.a = a\n"
_POINT = "class P:\n    def __init__(self, x): self.x = x\n"


def _unittest() -> list[tuple[Any, str, str]]:
    endings = (
        "",
        "unittest.main()",
        "if __name__ == '__main__':\n    unittest.main()",
        "unittest.main(argv=['first-arg-is-ignored'], exit=False)",
        "unittest.main(verbosity=2, exit=False)",
        "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))",
        "suite = unittest.TestSuite()\nsuite.addTest(T('test_a'))\nunittest.TextTestRunner(verbosity=0).run(suite)",
        "T('test_a').run()",
        "T('test_a')()",
        "result = unittest.main(exit=False).result\nprint(result.wasSuccessful())",
        "import sys\nsys.exit(0 if unittest.main(exit=False).result.wasSuccessful() else 0)",
        "try:\n    unittest.main()\nexcept SystemExit:\n    print('done')",
        "def run():\n    unittest.main(exit=False)\nif __name__ == '__main__':\n    run()",
    )
    bodies = (
        "def test_a(self):\n        for x in (1, 2):\n            with self.subTest(x=x):\n                self.assertEqual(f(x), 2 * x)",
        "def setUp(self): self.x = 3\n    def test_a(self): self.assertEqual(f(self.x), 6)",
        "@classmethod\n    def setUpClass(cls): cls.x = f(3)\n    def test_a(self): self.assertTrue(self.x == 6)",
        "def test_a(self):\n        try:\n            self.assertEqual(f(3), 6)\n        except AssertionError:\n            print('no')",
        "@unittest.expectedFailure\n    def test_a(self): self.assertEqual(f(3), 7)\n    def test_b(self): self.assertEqual(f(3), 6)",
        "@unittest.skip('later')\n    def test_a(self): self.assertEqual(f(3), 7)\n    def test_b(self): self.assertEqual(f(3), 6)",
        "def test_a(self):\n        self.assertAlmostEqual(f(0.5), 1.0)\n        self.assertIn(f(1), [2])",
        "def tearDown(self): assert f(3) == 6\n    def test_a(self): pass",
        "def test_a(self):\n        if f(3) != 6:\n            self.fail('no')",
    )
    rows: list[tuple[Any, str, str]] = [(_CASE + ending, DOUBLE, SAME) for ending in endings]
    rows += [(f"import unittest\nclass T(unittest.TestCase):\n    {body}\n", DOUBLE, SAME) for body in bodies]
    raises = "def test_a(self):\n        with self.assertRaises(ValueError): f(-1)\n        self.assertRaises(ValueError, f, -2)"
    rows.append((f"from unittest import TestCase, main\nclass T(TestCase):\n    {raises}\nmain()", RAISING, DOUBLE))
    matches = "def test_a(self):\n        with self.assertRaisesRegex(ValueError, 'neg') as c: f(-1)\n        self.assertEqual(str(c.exception), 'negative')"
    rows.append((f"import unittest\nclass T(unittest.TestCase):\n    {matches}", RAISING, DOUBLE))
    later = "async def test_a(self): self.assertEqual(await f(3), 6)"
    rows.append(
        (
            f"import unittest\nclass T(unittest.IsolatedAsyncioTestCase):\n    {later}\n",
            f"async {DOUBLE}",
            f"async {SAME}",
        )
    )
    rows.append((f"from solution import f\n{_CASE}", DOUBLE, "def g(x): return 2 * x"))
    return rows


def _pytest() -> list[tuple[Any, str, str]]:
    texts = (
        "def test_a():\n    assert f(3) == 6",
        "from solution import f\nimport pytest\ndef test_a():\n    assert f(3) == 6",
        "from your_module import f as g\ndef test_a():\n    assert g(3) == 6",
        "import solution\ndef test_a():\n    assert solution.f(3) == 6",
        "from main import *\ndef test_a():\n    assert f(3) == 6",
        "assert callable(f)\ndef test_a():\n    assert f(3) == 6",
        "import pytest\n@pytest.mark.parametrize('x, y', [(1, 2), (3, 6)])\ndef test_a(x, y):\n    assert f(x) == y",
        "import pytest\n@pytest.mark.parametrize('x', [1, pytest.param(3, id='three')], ids=str)\n@pytest.mark.parametrize('n', [2])\n"
        "def test_a(x, n):\n    assert f(x) == n * x",
        "import pytest\ndef test_a():\n    assert f(0.5) == pytest.approx(1.0)\n    assert [f(1.0)] == pytest.approx([2.0])",
        "class TestF:\n    def setup_method(self): self.x = 3\n    def test_a(self):\n        assert f(self.x) == 6",
        "import pytest\nclass TestF:\n    @pytest.mark.parametrize('x,y', [(3, 6)])\n    def test_a(self, x, y):\n        assert f(x) == y",
        "class TestA:\n    def test_a(self):\n        assert f(0) == 0\nclass TestB:\n    def test_a(self):\n        assert f(3) == 6",
        "def test_a():\n    assert f(3) == 6\nif __name__ == '__main__':\n    test_a()\n    print('ok')",
        "import pytest, sys\ndef test_a():\n    assert f(3) == 6\nif __name__ == '__main__':\n    sys.exit(pytest.main([__file__]))",
        "import pytest\n@pytest.mark.skip\ndef test_b():\n    assert f(3) == 7\ndef test_a():\n    assert f(3) == 6",
        "def test_a():\n    return f(3) == 6",
        "def test_a():\n    try:\n        assert f(3) == 6\n    except AssertionError as error:\n        print('FAIL', error)",
        "for test in [lambda: None]:\n    test()\ndef test_a():\n    assert f(3) == 6",
    )  # fmt: skip
    rows: list[tuple[Any, str, str]] = [(text, DOUBLE, SAME) for text in texts]
    raises = "import pytest\ndef test_a():\n    with pytest.raises(ValueError, match='neg') as info:\n        f(-1)\n    assert 'neg' in str(info.value)"
    rows.append((raises, RAISING, DOUBLE))
    rows.append(
        (
            "import pytest\n@pytest.mark.asyncio\nasync def test_a():\n    assert await f(3) == 6",
            f"async {DOUBLE}",
            f"async {SAME}",
        )
    )
    return rows


def _check() -> list[tuple[Any, str, str]]:
    def row(code: str, entry: str = "f") -> Any:
        return {"type": "asserts", "code": code, "entry_point": entry}

    check = "def check(candidate):\n    assert candidate(3) == 6\n"
    member = "class Solution:\n    def f(self, x): return {}"
    return [
        (row(check), DOUBLE, SAME),
        (row(f"METADATA = {{'author': 'x'}}\n\n{check}\n"), DOUBLE, SAME),
        (row(f"{check}\ncheck(f)"), DOUBLE, SAME),
        (row("def check(candidate):\n    return candidate(3) == 6"), DOUBLE, SAME),
        (row("def check(candidate):\n    return candidate(3) == 6\nprint(check(f))"), DOUBLE, SAME),
        (row("def check(f):\n    return all(f(x) == 2 * x for x in range(3))\nprint('ok' if check(f) else 'no')"), DOUBLE, SAME),
        (row("def check(f):\n    try:\n        assert f(3) == 6\n        return True\n    except AssertionError:\n        return False\nok = check(f)"), DOUBLE, SAME),
        (row("def check(candidate):\n    assert abs(candidate(0.5) - 1.0) < 1e-6"), DOUBLE, "def abs(x): return 0\ndef f(x): return x"),
        (row(check, "Solution().f"), member.format("2 * x"), member.format("x")),
        (row("assert candidate(3) == 6"), DOUBLE, SAME),
        (row("def check(candidate):\n    assert candidate([1, 2]) == 3", "sum"), "def sum(v): return v[0] + v[1]", "def sum(v): return v[0]"),
        (row("def check(candidate):\n    for x in range(4):\n        try:\n            assert candidate(x) == 2 * x\n        except Exception as e:\n            print(x, e)"), DOUBLE, BROKEN),
    ]  # fmt: skip


def _swallowed() -> list[tuple[Any, str, str]]:
    texts = (
        "try:\n    assert f(3) == 6\n    print('ok')\nexcept AssertionError:\n    print('failed')",
        "try:\n    assert f(3) == 6\nexcept:\n    pass",
        "try:\n    assert f(3) == 6\nexcept (AssertionError, ValueError) as e:\n    print(e)\nelse:\n    print('PASS')",
        "def run(name, test):\n    try:\n        test()\n        print(name, 'PASS')\n    except Exception as e:\n        print(name, 'FAIL', e)\n"
        "def first():\n    assert f(3) == 6\nrun('first', first)",
        "failed = 0\nfor x in range(4):\n    try:\n        assert f(x) == 2 * x\n    except AssertionError:\n        failed += 1\nprint(failed)",
        "import contextlib\nwith contextlib.suppress(AssertionError):\n    assert f(3) == 6",
        "def one():\n    try:\n        assert f(3) == 6\n    finally:\n        return None\none()",
        "for x in range(4):\n    try:\n        value = f(x)\n        assert value == 2 * x\n    except AssertionError:\n        continue",
        "value = f(0)\nassert value == 0\ntry:\n    value = f(3)\n    assert value == 6\nexcept AssertionError:\n    print('no')",
        "def correct():\n    return f(3) == 6\ncorrect()",
        "def main():\n    passed = 0\n    try:\n        assert f(3) == 6\n        passed += 1\n    except Exception:\n        print('no')\n    print(passed, 'passed')\nmain()",
        "import sys\nif f(3) != 6:\n    sys.exit(1)",
        "if f(3) != 6:\n    raise SystemExit('wrong')",
        "try:\n    if f(3) != 6:\n        raise Exception('wrong')\nexcept Exception as e:\n    print(e)",
        "results = []\ntry:\n    assert f(3) == 6\n    results.append(True)\nexcept AssertionError:\n    results.append(False)\nprint(results)",
    )  # fmt: skip
    rows: list[tuple[Any, str, str]] = [(text, DOUBLE, wrong) for text in texts for wrong in (SAME,)]
    rows += [(texts[number], DOUBLE, BROKEN) for number in (1, 3, 10)]
    return rows


def _expected_errors() -> list[tuple[Any, str, str]]:
    """Honest tests with handlers, which must not be taken for swallowing ones."""
    texts = (
        "try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass\nassert f(1) == 2",
        "try:\n    f(-1)\n    assert False, 'no error'\nexcept Exception:\n    pass",
        "try:\n    f(-1)\nexcept Exception as e:\n    assert isinstance(e, ValueError)\nelse:\n    raise AssertionError('no error')",
        "try:\n    f(-1)\n    raised = False\nexcept Exception:\n    raised = True\nassert raised",
        "def raises(*given):\n    try:\n        f(*given)\n    except Exception:\n        return True\n    return False\nassert raises(-1)\nassert not raises(1)",
        "def name_of_error(call):\n    try:\n        return call()\n    except Exception as e:\n        return type(e).__name__\nassert name_of_error(lambda: f(-1)) == 'ValueError'",
        "try:\n    assert f(-1) == 0\nexcept ValueError as e:\n    assert 'neg' in str(e)",
        "try:\n    result = f(-1)\nexcept Exception:\n    result = None\nassert result is None",
        "errors = []\nfor x in (-1, 2):\n    try:\n        f(x)\n    except Exception as e:\n        errors.append(str(e))\nassert errors == ['negative']",
        "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        with self.assertRaises(AssertionError):\n            self.assertEqual(f(2), 5)\n"
        "        self.assertRaises(ValueError, f, -1)",
        "try:\n    assert f(2) == 5\nexcept AssertionError:\n    pass\nelse:\n    raise RuntimeError('5?')\ntry:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass",
        "import pytest\nwith pytest.raises(AssertionError):\n    assert f(2) == 5\nwith pytest.raises(ValueError):\n    f(-1)",
        "ok = 0\nfor x in (1, 2, -1):\n    try:\n        assert f(x) == 2 * x\n        ok += 1\n    except Exception:\n        pass\nassert ok == 2",
        "try:\n    assert f(2) == 4\nexcept AssertionError:\n    raise\ntry:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
    )  # fmt: skip
    return [(text, RAISING, DOUBLE) for text in texts]


def _objects() -> list[tuple[Any, str, str]]:
    enum = "import enum\nclass C(enum.Enum):\n    R = 1\n    G = 2\ndef f(x): return C.{}"
    own = "class Low(Exception):\n    def __init__(self, x):\n        super().__init__(f'too low: {x}')\n        self.x = x\n"
    named = "from typing import NamedTuple\nclass N(NamedTuple):\n    x: int\n    y: int\ndef f(a, b): return N({})"
    manager = "from contextlib import contextmanager\n@contextmanager\ndef f(x):\n    yield {}"
    block = "class R:\n    def __init__(self): self.open = False\n    def __enter__(self):\n        self.open = True\n        return self\n    def __exit__(self, *a):\n        self.open = {}\n"
    vector = "class V:\n    def __init__(self, x, y): self.x, self.y = x, y\n    def __mul__(self, o): return self.x * o.x + self.y * o.{}\n    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** .5\n"
    key = _POINT + "    def __eq__(self, o): return self.x == o.x\n    def __hash__(self): return {}"
    adder = "class Adder:\n    def __init__(self, n): self.n = n\n    def __call__(self, x): return self.n + {}"
    stack = "class Stack(list):\n    def push(self, x): self.append({})"
    agen = "async def f(n):\n    for i in range(n): yield {} * i"
    queue = "import asyncio\nasync def put(q): await q.put({})\nasync def get(q): return await q.get()\ndef queue(): return asyncio.Queue()"
    return [
        ("import asyncio\nassert asyncio.run(f(3)) == 6", f"async {DOUBLE}", f"async {SAME}"),
        ("import asyncio\nloop = asyncio.new_event_loop()\nassert loop.run_until_complete(f(3)) == 6", f"async {DOUBLE}", f"async {SAME}"),
        ("import asyncio\nasync def main():\n    return await asyncio.gather(f(1), f(2))\nassert asyncio.run(main()) == [2, 4]", f"async {DOUBLE}", f"async {SAME}"),
        ("import asyncio\nasync def main():\n    return [v async for v in f(3)]\nassert asyncio.run(main()) == [0, 2, 4]", agen.format(2), agen.format(3)),
        ("import asyncio\nasync def main():\n    q = queue()\n    return (await asyncio.gather(get(q), put(q)))[0]\nassert asyncio.run(main()) == 6", queue.format(6), queue.format(7)),
        ("with f(3) as v:\n    assert v == 6", manager.format("2 * x"), manager.format("x")),
        ("r = R()\nwith r as inner:\n    assert inner.open and inner is r\nassert not r.open", block.format("False"), block.format("True")),
        ("assert repr([Box(1)]) == '[Box(1)]'\nassert f'{Box(2)!r:>8}' == '  Box(2)'", _BOX + "    def __repr__(self): return f'Box({self.a})'", _BOX),
        ("assert repr(f(1)) == 'Box(a=1)'", "from dataclasses import dataclass\n@dataclass\nclass Box:\n    a: int\ndef f(x): return Box(x)", _BOX + "def f(x): return Box(x)"),
        ("assert {P(1): 3}[P(1)] == 3\nassert len({P(1), P(1), P(2)}) == 2", key.format("hash(self.x)"), key.format("id(self)")),
        ("assert f(1) is C.R\nassert f(1) != C.G and C.R.name == 'R' and C(2) is C.G and len(C) == 2", enum.format("R"), enum.format("G")),
        ("assert [c.name for c in C] == ['R', 'G'] and C['R'].value == 1 and f(0) in C and f(0) is C.R", enum.format("R"), enum.format("G")),
        ("b = f(1)\nassert isinstance(b, Box) and type(b) is Box and Box.__name__ == 'Box' and not isinstance(b, int)", _BOX + "def f(x): return Box(x)", _BOX + "def f(x): return x"),
        ("assert issubclass(Dog, Animal) and isinstance(Dog(), Animal)", "class Animal: pass\nclass Dog(Animal): pass", "class Animal: pass\nclass Dog: pass"),
        ("try:\n    f(1)\n    assert False\nexcept Low as e:\n    assert e.x == 1 and str(e) == 'too low: 1'", own + "def f(x): raise Low(x)", own + "def f(x): raise ValueError(x)"),
        ("import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        with self.assertRaises(Low) as c:\n            f(1)\n        self.assertEqual(c.exception.x, 1)", own + "def f(x): raise Low(x)", own + "def f(x): return x"),
        ("import pytest\ndef test_a():\n    with pytest.raises(Low, match='low'):\n        f(1)", own + "def f(x): raise Low(x)", own + "def f(x): return x"),
        ("assert isinstance(f(1, 2), tuple) and f(1, 2) == (1, 2) and f(1, 2).y == 2", named.format("a, b"), named.format("b, a")),
        ("assert float(V(3, 4)) == 5.0 and bool(V(0, 1))", "class V:\n    def __init__(s, x, y): s.x, s.y = x, y\n    def __float__(s): return float(s.x ** 2 + s.y ** 2) ** .5", "class V:\n    def __init__(s, x, y): s.x, s.y = x, y\n    def __float__(s): return 0.0"),
        ("assert abs(V(3, 4)) == 5 and V(1, 2) * V(3, 4) == 11", vector.format("y"), vector.format("x")),
        ("assert Adder(3)(4) == 7", adder.format("x"), adder.format("1")),
        ("s = Stack()\ns.push(1)\ns.push(2)\nassert s == [1, 2] and isinstance(s, list) and len(s) == 2", stack.format("x"), stack.format("0")),
        ("import copy\na = Box([1])\nb = copy.deepcopy(a)\nb.a.append(2)\nb.a = 5\nassert a.a == [1]", _BOX, _BOX.replace("= a", "= a + a")),
        ("assert Box(3)._secret == 6 and vars(Box(3)) == {'_secret': 6}", "class Box:\n    def __init__(self, a): self._secret = 2 * a", "class Box:\n    def __init__(self, a): self._secret = a"),
        ("assert f.__name__ == 'f' and f.__doc__ == 'Doubles.'", "def f(x):\n    'Doubles.'", "def f(x): pass"),
        ("t = Tree([1, 3])\nassert 3 in t and 2 not in t", "class Tree:\n    def __init__(s, v): s.v = v\n    def __contains__(s, x): return x in s.v", "class Tree:\n    def __init__(s, v): s.v = v\n    def __contains__(s, x): return True"),
        ("g = Grid()\ng[1] = 5\nassert g[1] == 5\ndel g[1]\nassert len(g) == 0", "class Grid(dict): pass", "class Grid(dict):\n    def __delitem__(s, k): pass"),
        ("from datetime import date, timedelta\nassert f(date(2024, 2, 28)) == date(2024, 3, 1)", "from datetime import timedelta\ndef f(d): return d + timedelta(days=2)", SAME),
        ("a, b = f('a'), f('a')\nassert a is b", "_made = {}\nclass S: pass\ndef f(k): return _made.setdefault(k, S())", "class S: pass\ndef f(k): return S()"),
    ]  # fmt: skip


def _streams() -> list[tuple[Any, str, str]]:
    prints, same = "def f(x): print(2 * x)", "def f(x): print(x)"
    reads, wrong = "def f(): return 2 * int(input())", "def f(): return int(input())"
    catch = "import io, contextlib\nb = io.StringIO()\nwith contextlib.redirect_stdout(b):\n    f(3)\nassert b.getvalue() == '6\\n'"
    return [
        (catch, prints, same),
        (catch, "import sys\ndef f(x): sys.stdout.write(f'{2 * x}\\n')", same),
        ("import io, sys\nold = sys.stdout\nsys.stdout = b = io.StringIO()\nf(3)\nsys.stdout = old\nassert b.getvalue().strip() == '6'", prints, same),
        ("import io\nfrom unittest.mock import patch\nwith patch('sys.stdout', new_callable=io.StringIO) as out:\n    f(3)\nassert out.getvalue() == '6\\n'", prints, same),
        ("from unittest.mock import patch\nwith patch('builtins.print') as p:\n    f(3)\np.assert_called_once_with(6)", prints, same),
        ("from unittest.mock import patch\nwith patch('builtins.input', return_value='3'):\n    assert f() == 6", reads, wrong),
        ("from unittest.mock import patch\n@patch('builtins.input', side_effect=['1', '3'])\ndef test_a(given):\n    assert f() == 2\n    assert f() == 6", reads, wrong),
        ("import builtins\nbuiltins.input = lambda prompt='': '3'\nassert f() == 6", reads, wrong),
        ("import io, sys\nsys.stdin = io.StringIO('1\\n3\\n')\nassert f() == 2\nassert f() == 6", reads, wrong),
        ("import io, sys\nsys.stdin = io.StringIO('1 2\\n3 4\\n')\nassert f() == 10", "import sys\ndef f(): return sum(map(int, sys.stdin.read().split()))", "def f(): return 1 + len(input())"),
        ("import io, contextlib\ne = io.StringIO()\nwith contextlib.redirect_stderr(e):\n    f(3)\nassert '6' in e.getvalue()", "import sys\ndef f(x): print(2 * x, file=sys.stderr)", prints),
        ("import random\nrandom.seed(5)\nx = random.random()\nrandom.seed(5)\nassert f() == x", "import random\ndef f(): return random.random()", "def f(): return 0.5"),
    ]  # fmt: skip


def _functions() -> list[tuple[Any, str, str]]:
    memo = "def memo(g):\n    seen = {}\n    def inner(x):\n        if x not in seen: seen[x] = g(x)\n        return seen[x]\n    return inner"
    retry = "def retry(g, n):\n    for i in range(n):\n        try: return g()\n        except ValueError:\n            if i == n - 1: raise"
    curry = "def curry(g):\n    n = g.__code__.co_argcount\n    def inner(*a):\n        return g(*a) if len(a) == n else lambda *b: inner(*a, *b)\n    return inner"
    wraps = (
        "import functools\ndef deco(g):\n    @functools.wraps(g)\n    def inner(*a): return 2 * g(*a)\n    return inner"
    )
    return [
        ("assert f(lambda a: a + 1, 3) == 8", "def f(g, x): return 2 * g(x)", "def f(g, x): return g(x)"),
        ("assert f([3, 1, 2], key=lambda v: -v) == [3, 2, 1]", "def f(v, key): return sorted(v, key=key)", "def f(v, key): return sorted(v)"),
        ("calls = []\ndef slow(x):\n    calls.append(x)\n    return x\nfast = memo(slow)\nassert fast(1) == 1 and fast(1) == 1 and calls == [1]", memo, "def memo(g): return g"),
        ("tries = []\ndef flaky():\n    tries.append(1)\n    if len(tries) < 3: raise ValueError('again')\n    return 'ok'\nassert retry(flaky, 3) == 'ok' and len(tries) == 3", retry, "def retry(g, n): return g()"),
        ("class Mine(ValueError): pass\ndef bad(): raise Mine('x')\ntry:\n    retry(bad, 2)\n    assert False\nexcept Mine as e:\n    assert str(e) == 'x'", retry, "def retry(g, n): pass"),
        ("assert curry(lambda a, b, c: a + b * c)(1)(2)(3) == 7", curry, "def curry(g): return lambda a: lambda b: lambda c: 0"),
        ("@deco\ndef one(x):\n    return x\nassert one(3) == 6 and one.__name__ == 'one'", wraps, "def deco(g): return g"),
        ("assert f(len, ['a', 'bb']) == [1, 2]\nassert f(str.upper, ['a']) == ['A']", "def f(g, v): return list(map(g, v))", "def f(g, v): return v"),
        ("from unittest.mock import Mock\nm = Mock()\nf(m, 3)\nm.assert_called_once_with(6)", "def f(g, x): g(2 * x)", "def f(g, x): g(x)"),
        ("assert f(f2)(3) == 12", "def f2(x): return 2 * x\ndef f(g): return lambda x: g(g(x))", "def f2(x): return 2 * x\ndef f(g): return g"),
        ("def judge(x):\n    assert x == 6\nf(judge, 3)\nassert True is not f", "def f(g, x): g(2 * x)", "def f(g, x):\n    try: g(x)\n    except AssertionError: pass"),
        ("assert f(iter([1, 2, 3])) == 6\nassert f(x for x in [4]) == 4", "def f(v): return sum(v)", "def f(v): return len(list(v))"),
    ]  # fmt: skip


_MAKERS = {"unittest": _unittest, "pytest": _pytest, "check": _check, "swallowed": _swallowed, "errors": _expected_errors,
           "objects": _objects, "streams": _streams, "functions": _functions}  # fmt: skip
ROWS: list[tuple[str, Any, str, str]] = [(kind, *row) for kind, make in _MAKERS.items() for row in make()]

# none may be graded correct
CHEATS: list[tuple[str, str]] = [
 ("assert abs(F(2) - 4) < 1e-9", "class F:\n    def __init__(s, x): pass\n    def __sub__(s, o): return 0\n    def __abs__(s): return 0.0"),
 ("import pytest\ndef test_a():\n    assert f(2.0) == pytest.approx(4.0)", "class E:\n    def __eq__(s, o): return True\n    def __abs__(s): return 0.0\n    def __sub__(s, o): return s\n    def __le__(s, o): return True\n    def __float__(s): return 4.0\n    def __complex__(s): return 4+0j\ndef f(x): return E()"),
 ("import math\nassert math.isclose(f(2), 4)", "class E:\n    def __float__(s): return 4.0\ndef f(x): return E()"),
 ("with f(3) as v:\n    assert v == 6", "class M:\n    def __enter__(s): return 5\n    def __exit__(s, *a): return True\ndef f(x): return M()"),
 ("with f(3) as v:\n    assert v.total() == 6", "class M:\n    def __enter__(s): return s\n    def total(s): raise ValueError\n    def __exit__(s, *a): return True\ndef f(x): return M()"),
 (BODY + "self.assertEqual(f(3), 6)", "import unittest\ndef f(x): raise unittest.SkipTest('no')"),
 (BODY + "self.assertEqual(f(3), 6)", "class SkipTest(Exception): pass\ndef f(x): raise SkipTest('no')"),
 ("import pytest\ndef test_a():\n    assert f(3) == 6", "class Skipped(Exception): pass\ndef f(x): raise Skipped('no')"),
 (BODY + "self.assertEqual(f(3), 6)", "def f(x): raise SystemExit(0)"),
 ("from solution import f\nassert abs(f(2.0) - 4.0) < 1e-6", "def abs(x): return 0\ndef f(x): return x"),
 (BODY + "self.assertTrue(f(3) == 6)", "class E:\n    def __eq__(s, o): return True\ndef f(x): return E()"),
 (BODY + "self.assertEqual(f(3), [1, 2])", "class E(list):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\ndef f(x): return E()"),
 (BODY + "self.assertCountEqual(f(3), [1, 2])", "class E:\n    def __iter__(s): return iter([E(), E()])\n    def __eq__(s, o): return True\n    def __hash__(s): return 1\ndef f(x): return E()"),
 (BODY + "self.assertIn(f(3), [6])", "class E:\n    def __eq__(s, o): return True\n    def __hash__(s): return 6\ndef f(x): return E()"),
 ("assert f(3) in {6, 7}", "class E(int):\n    def __hash__(s): return 6\n    def __eq__(s, o): return True\ndef f(x): return E(1)"),
 ("assert 6 in f(3)", "class E:\n    def __contains__(s, o): return True\ndef f(x): return E()"),
 ("assert f(lambda v: v + 1, 3) == 8", "import os, struct\ndef f(g, x):\n    b = b'D[[true],\"\"]'\n    os.write(4, struct.pack('<I', len(b)) + b)\n    return 0"),
 ("assert f(lambda v: v + 1, 3) == 8", "import os, struct\ndef f(g, x):\n    b = b'B[\"callback\",0,[\"list\",[]],[\"dict\",[]]]'\n    while 1: os.write(4, struct.pack('<I', len(b)) + b)"),
 ("assert f(lambda v: v + 1, 3) == 8", "def f(g, x):\n    while 1: g(x)"),
 ("assert f(3) == 6", "import os, struct\ndef f(x):\n    b = b'A[\"error\",\"Unverifiable\",\"x\",[\"class\",0,\"Unverifiable\",\"\",[]]]'\n    os.write(4, struct.pack('<I', len(b)) + b)\n    return 1"),
 ("assert f(3) == 6", "import os, struct\ndef f(x):\n    b = b'A[\"value\",[\"reference\",0,[\"reference\",0,null,[\"class\",1,\"X\",\"\",[]]],[\"class\",1,\"X\",\"\",[]]]]'\n    os.write(4, struct.pack('<I', len(b)) + b)\n    return 1"),
 ("try:\n    assert f(3) == 6\nexcept ValueError:\n    pass", "class B(type): pass\ndef f(x): return 1"),
 ("import asyncio\nassert asyncio.run(f(3)) == 6", "class A:\n    def __await__(s):\n        yield\n        return 6\n    def __eq__(s, o): return True\nasync def f(x): return A()"),
 ("import io, contextlib\nb = io.StringIO()\nwith contextlib.redirect_stdout(b):\n    f(3)\nassert b.getvalue() == '6\\n'", "import sys\ndef f(x): sys.__stdout__.write('6\\n')"),
 ("assert f() == 6\nassert repr(f()) == '6'", "class R:\n    def __repr__(s): return '6'\ndef f(): return R()"),
 ("assert isinstance(f(3), int)\nassert f(3) == 6", "class I(int):\n    __class__ = int\n    def __eq__(s, o): return True\ndef f(x): return I(0)"),
 ("assert type(f(3)) is int and f(3) % 2 == 0 and f(3) == 6", "class I:\n    def __mod__(s, o): return 0\ndef f(x): return I()"),
 ("a = f(3)\nassert a - 6 == 0 and not a != 6", "class I:\n    def __sub__(s, o): return 0\n    def __rsub__(s, o): return 0\n    def __eq__(s, o): return True\ndef f(x): return I()"),
 ("assert sum([f(1), f(2)]) == 6", "class I:\n    def __radd__(s, o): return I()\n    def __add__(s, o): return I()\n    def __eq__(s, o): return True\ndef f(x): return I()"),
 ("assert f(3) <= 6 <= f(3)", "class I:\n    def __le__(s, o): return True\n    def __ge__(s, o): return True\ndef f(x): return I()"),
 ("assert not (f(3) < 6 or f(3) > 6)", "class I:\n    def __lt__(s, o): return False\n    def __gt__(s, o): return False\ndef f(x): return I()"),
    ("from unittest.mock import Mock, MagicMock, call\nsender = Mock()\nf(sender)\nsender.a.assert_called_once_with(3)", "def f(s): s.a.assert_called_once_with = lambda *_: None"),
    ("from unittest.mock import Mock, MagicMock, call\nsender = Mock()\nf(sender)\nsender.a.assert_called_once_with(3)", "def f(s): s.a.configure_mock(assert_called_once_with=lambda *_: None)"),
]  # fmt: skip

UNVERIFIABLE: list[tuple[str, str]] = [
    ("class Mine: pass\nassert f(Mine()) == 1", "def f(x): return 1"),
    ("class Dog(Animal):\n    pass\nassert Dog().x == 1", "class Animal: x = 1"),
    ("assert Money(3) == 3", "class Money:\n    def __init__(s, x): s.x = x\n    def __eq__(s, o): return s.x == o"),
    ("assert Money(3) < 4", "class Money:\n    def __init__(s, x): s.x = x\n    def __lt__(s, o): return s.x < o"),
    ("assert Money(3) + 1 == 4", "class Money:\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return s.x + o"),
    ("import inspect\nassert list(inspect.signature(f).parameters) == ['x']", SAME),
    ("import dataclasses\nassert dataclasses.asdict(P(1)) == {'x': 1}", "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int"),
    ("import unittest\nclass T(unittest.TestCase):\n    @unittest.skip('')\n    def test_a(self): self.assertEqual(f(3), 6)", DOUBLE),
    ("from unittest.mock import Mock, MagicMock, call\nsender = Mock()\nf(sender)\nsender.a.assert_called_once_with(3)", "def f(s):\n    with s as a: a.x(1)"),
    ("from unittest.mock import Mock, MagicMock, call\nsender = Mock()\nf(sender)\nsender.a.assert_called_once_with(3)", "def f(s): return len(s)"),
    ("import asyncio\nasync def one():\n    assert await f(3) == 6\nasync def main():\n    asyncio.create_task(one())\nasyncio.run(main())", f"async {DOUBLE}"),
    ("from unittest.mock import AsyncMock\nimport asyncio\nm = AsyncMock(return_value=1)\nassert asyncio.run(f(m)) == 1", "async def f(s): return await s()"),
    ("counter = 0\nhit(); hit()\nassert counter == 2", "counter = 0\ndef hit():\n    global counter\n    counter += 1"),
    ("log.append(4)\nf(2)\nassert log == [4, 2]", "log = []\ndef f(x):\n    log.append(x)\n    return x"),
]  # fmt: skip

REFUSED: list[tuple[Any, str]] = [
    ("it must print the double", "not Python"),
    (">>> f(3)\n6", "not Python"),
    ("eJxrYJlqwwABPRbR1UqZeQWlJUpWCkrGMXlKOgpK", "cannot be read|cannot fail"),
    ("def f(x):\n    return 2 * x", "cannot fail"),
    ("f(3)", "cannot fail"),
    ("if f(3) != 6:\n    print('FAIL')\nelse:\n    print('PASS')", "cannot fail"),
    ("print('PASS' if f(3) == 6 else 'FAIL')", "cannot fail"),
    ("print(f(3) == 6)", "cannot fail"),
    ("f(3) == 6", "cannot fail"),
    ("passed = 0\nif f(3) == 6:\n    passed += 1\nprint(passed)", "cannot fail"),
    ("assert True", "cannot fail"),
    ("def verify():\n    assert f(3) == 6", "nothing calls verify"),
    ("import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        print(f(3))", "cannot fail"),
    ("def check(candidate):\n    assert candidate(3) == 6", "entry_point"),
    ("def test_a(tmp_path):\n    assert f(tmp_path) == 6", "tmp_path"),
    ("def test_a(capsys):\n    f(3)\n    assert capsys.readouterr().out == '6'", "capsys"),
    ("import pytest\n@pytest.fixture\ndef x():\n    return 3\ndef test_a(x):\n    assert f(x) == 6", "fixture"),
    ("class TestF:\n    def test_a(self, monkeypatch):\n        assert f(3) == 6", "monkeypatch"),
    ("import numpy as np\nassert np.array_equal(f(3), [6])", "numpy"),
    ("from unittest.mock import patch\nwith patch('time.sleep'):\n    assert f(3) == 6", "time.sleep"),
    ("from unittest.mock import patch\nimport time\nwith patch.object(time, 'sleep'):\n    assert f(3) == 6", "time.sleep"),
    ("with open('a.txt', 'w') as file:\n    file.write('3')\nassert f('a.txt') == 6", "files"),
    ("import tempfile\nwith tempfile.TemporaryDirectory() as folder:\n    assert f(folder) == 6", "files"),
    ("import os\nos.environ['X'] = '3'\nassert f() == 6", "os.environ"),
    ("import sys\nsys.argv = ['f', '3']\nassert f() == 6", "sys.argv"),
    ("import random\nrandom.random = lambda: 0.5\nassert f() == 1", "random.random"),
    ("import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        with self.assertLogs():\n            f(3)", "logs"),
    ("import pytest\nwith pytest.warns(UserWarning):\n    f(3)", "warnings"),
    ("import warnings\nwith warnings.catch_warnings(record=True) as caught:\n    f(3)\nassert len(caught) == 1", "warnings"),
    ({"type": "asserts", "code": "assert f(3) == 6", "entry_point": "f of x"}, "entry_point"),
    ("assert (f(3) == 6, 'no')", "cannot fail"),
    ("assert [f(3) == 6]", "cannot fail"),
    ("assert (f(x) == 2*x for x in range(3))", "cannot fail"),
    ("assert f(3) == 6 or True", "cannot fail"),
    ("assert f'{f(3)} == 6'", "cannot fail"),
    ("assert lambda: f(3) == 6", "cannot fail"),
    ("import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertTrue((f(3) == 6, 'no'))", "cannot fail"),
    ("def expect(a, b):\n    assert (a == b, 'no')\nexpect(f(3), 6)", "cannot fail"),
    ("import sys\ngot = f(3)\nif got != 6: sys.stderr.write(got)", "cannot fail"),
    ("import warnings\ngot = f(3)\nif got != 6: warnings.warn(got)", "cannot fail"),
    ("bad = []\ngot = f(3)\nif got != 6: bad.append(got)\nprint(bad)", "cannot fail"),
    ("import logging\ngot = f(3)\nif got != 6: logging.error('x', got)", "cannot fail"),
    ("if f(3) != 6: raise SystemExit", "cannot fail"),
    ("from pprint import pprint\ngot=f(3)\npprint(got)", "cannot fail"),
    ("from multiprocessing import Process\ndef one(): assert f(3) == 6\np = Process(target=one)\np.start()\np.join()", "processes"),
    ("import sys, subprocess\nassert subprocess.run([sys.executable, 'solution.py'], input='3').stdout == '6'", "processes"),
    ("import asyncio\nasync def one(x, want):\n    assert await f(x) == want\none(3, 6)", "do not await"),
]  # fmt: skip
