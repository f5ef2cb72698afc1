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
_BODY = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        "
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

# written after the first were right, and tried once before more was repaired
SECOND: list[tuple[Any, str, str]] = [
 (_BODY + "for x in range(3):\n            try:\n                self.assertEqual(f(x), 2*x)\n            except AssertionError as e:\n                self.report(e)\n    def report(self, e): print(e)", DOUBLE, SAME),
 ("import threading\ndef test_a():\n    assert f(3) == 6\nt = threading.Thread(target=test_a)\nt.start()\nt.join()", DOUBLE, SAME),
 ("import threading\nc = Counter()\nts = [threading.Thread(target=c.inc) for _ in range(5)]\n[t.start() for t in ts]\n[t.join() for t in ts]\nassert c.n == 5", "class Counter:\n    def __init__(s): s.n = 0\n    def inc(s): s.n += 1", "class Counter:\n    def __init__(s): s.n = 0\n    def inc(s): s.n = 1"),
 ("import importlib\nm = importlib.import_module('solution')\nassert m.f(3) == 6", DOUBLE, SAME),
 ("from solution import f as g, h\ndef test_a():\n    assert g(3) == 6 and h == 1", f"{DOUBLE}\nh = 1", f"{DOUBLE}\nh = 2"),
 (_BODY + "self.assertTrue(isinstance(f(3), int)); self.assertEqual(f(3), 6)\n    def setUp(self):\n        super().setUp()\n", DOUBLE, SAME),
 ("import unittest\nfrom solution import f\nclass Base(unittest.TestCase):\n    def check(self, x): self.assertEqual(f(x), 2*x)\nclass T(Base):\n    def test_a(self): self.check(3)\nif __name__ == '__main__':\n    unittest.main(argv=[''], verbosity=0, exit=False)", DOUBLE, SAME),
 ("import unittest\nloader = unittest.TestLoader()\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(3), 6)\nsuite = loader.loadTestsFromTestCase(T)\nresult = unittest.TestResult()\nsuite.run(result)\nprint(result.failures)", DOUBLE, SAME),
 ("import unittest\ndef suite_of(f):\n    class T(unittest.TestCase):\n        def test_a(self): self.assertEqual(f(3), 6)\n    return unittest.defaultTestLoader.loadTestsFromTestCase(T)\nunittest.TextTestRunner().run(suite_of(f))", DOUBLE, SAME),
 ("import unittest\nclass T(unittest.TestCase):\n    def runTest(self): self.assertEqual(f(3), 6)", DOUBLE, SAME),
 ("import unittest\nclass T(unittest.TestCase):\n    x = 3\n    def test_a(self):\n        self.addCleanup(lambda: self.assertEqual(f(3), 6))", DOUBLE, SAME),
 ("import unittest\ndef setUpModule(): assert f(3) == 6\nclass T(unittest.TestCase):\n    def test_a(self): pass", DOUBLE, SAME),
 ("import pytest\n@pytest.mark.parametrize('case', [{'x': 1, 'y': 2}, {'x': 3, 'y': 6}])\ndef test_a(case):\n    assert f(case['x']) == case['y']", DOUBLE, SAME),
 ("import pytest\n@pytest.mark.parametrize(('x', 'y'), [pytest.param(3, 6, id='a'), pytest.param(4, 9, marks=pytest.mark.xfail)])\ndef test_a(x, y):\n    assert f(x) == y", DOUBLE, SAME),
 ("import pytest\ndef test_a():\n    with pytest.raises((TypeError, ValueError)) as e:\n        f(-1)\n    assert e.type is ValueError and e.typename == 'ValueError' and e.value.args == ('negative',)", RAISING, DOUBLE),
 ("import pytest\npytest.raises(ValueError, f, -1)\nassert f(1) == 2", RAISING, DOUBLE),
 ("import pytest\nclass TestAll:\n    @classmethod\n    def setup_class(cls): cls.x = 3\n    @staticmethod\n    def test_s(): assert f(1) == 2\n    def test_a(self): assert f(self.x) == 6", DOUBLE, SAME),
 ("from pytest import approx, mark, raises\n@mark.parametrize('x', [1.0])\ndef test_a(x):\n    assert f(x) == approx(2.0, rel=1e-3)\n    assert {'a': f(x)} == approx({'a': 2.0})", DOUBLE, SAME),
 ("def test_a():\n    expected = 6\n    actual = f(3)\n    assert actual == expected, f'{actual} != {expected}'\n\ndef main():\n    test_a()\n    print('All tests passed!')\n\nif __name__ == '__main__':\n    main()", DOUBLE, SAME),
 ("def run_tests():\n    bad = []\n    for x in range(3):\n        if f(x) != 2 * x:\n            bad.append(x)\n    return not bad\nif __name__ == '__main__':\n    print('ok' if run_tests() else 'no')", DOUBLE, SAME),
 ("def test_a():\n    assert f(3) == 6\nall_tests = [test_a]\nfor t in all_tests:\n    try:\n        t()\n    except Exception as e:\n        print('x', e)", DOUBLE, "def f(x): raise KeyError"),
 ("class TestF:\n    def __init__(self): self.n = 3\n    def test_a(self): assert f(self.n) == 6\nTestF().test_a()", DOUBLE, SAME),
 ("async def test_a():\n    assert await f(3) == 6\nimport asyncio\nasyncio.run(test_a())", f"async {DOUBLE}", f"async {SAME}"),
 ("try:\n    f('x' * 3, 1)\nexcept TypeError:\n    pass\nassert f(1) == 2", DOUBLE, SAME),
 ("for bad in (-1, -2):\n    try:\n        f(bad)\n    except ValueError:\n        continue\n    else:\n        assert False, 'expected'\n", RAISING, DOUBLE),
 ("def expect(exc, *a):\n    try:\n        f(*a)\n    except exc:\n        return\n    raise AssertionError('no')\nexpect(ValueError, -1)", RAISING, DOUBLE),
 ("try:\n    f(-1)\nexcept:\n    ok = True\nelse:\n    ok = False\nassert ok", RAISING, DOUBLE),
 ("def safe(x):\n    try:\n        return f(x)\n    except Exception:\n        return 'error'\nassert [safe(-1), safe(1)] == ['error', 2]", RAISING, DOUBLE),
 ("log = []\ntry:\n    f(-1)\nexcept Exception as e:\n    log.append(type(e))\nassert log == [ValueError]", RAISING, DOUBLE),
 ("import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        try:\n            f(-1)\n        except ValueError as e:\n            self.assertEqual(str(e), 'negative')\n        else:\n            self.fail('no')", RAISING, DOUBLE),
 ("import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        try:\n            f(-1)\n            self.fail('no error')\n        except Exception:\n            pass", RAISING, DOUBLE),
 ("def check(candidate):\n    try:\n        candidate(-1)\n    except Exception:\n        pass\n    assert candidate(1) == 2\ncheck(f)", RAISING, SAME),
 ("with_error = False\ntry:\n    assert f(1) == 2\n    f(-1)\nexcept ValueError:\n    with_error = True\nassert with_error", RAISING, DOUBLE),
 ("import types\nassert isinstance(f(3), types.GeneratorType) and list(f(3)) == [0, 1, 2]", "def f(n): yield from range(n)", "def f(n): return list(range(n))"),
 ("import inspect\nassert inspect.isgenerator(f(2)) and callable(f)", "def f(n): yield n", "def f(n): return n"),
 ("import types\nassert isinstance(f, types.FunctionType) and f(1) == 2", DOUBLE, SAME),
 ("c = f('aab')\nassert c.most_common(1) == [('a', 2)] and c['z'] == 0", "from collections import Counter\ndef f(s): return Counter(s)", "def f(s): return {'a': 2}"),
 ("d = f()\nd['x'].append(1)\nassert d == {'x': [1]}", "from collections import defaultdict\ndef f(): return defaultdict(list)", "def f(): return {}"),
 ("import collections\nassert isinstance(f(), collections.OrderedDict) and list(f()) == ['a']", "from collections import OrderedDict\ndef f(): return OrderedDict(a=1)", "def f(): return {'a': 1}"),
 ("l = LinkedList()\nfor i in (1, 2, 3): l.append(i)\nassert list(l) == [1, 2, 3] and len(l) == 3 and str(l) == '1->2->3' and l.head.next.value == 2", "class N:\n    def __init__(s, v): s.value, s.next = v, None\nclass LinkedList:\n    def __init__(s): s.head = None; s.n = 0\n    def append(s, v):\n        s.n += 1\n        if not s.head: s.head = N(v); return\n        c = s.head\n        while c.next: c = c.next\n        c.next = N(v)\n    def __iter__(s):\n        c = s.head\n        while c: yield c.value; c = c.next\n    def __len__(s): return s.n\n    def __str__(s): return '->'.join(map(str, s))", "class LinkedList:\n    def __init__(s): s.v = []\n    def append(s, v): s.v.append(v)\n    def __len__(s): return 3"),
 ("a = Account(10)\ntry:\n    a.withdraw(20)\n    assert False\nexcept InsufficientFunds as e:\n    assert e.needed == 10\nassert a.balance == 10", "class InsufficientFunds(Exception):\n    def __init__(s, n): s.needed = n\nclass Account:\n    def __init__(s, b): s.balance = b\n    def withdraw(s, n):\n        if n > s.balance: raise InsufficientFunds(n - s.balance)\n        s.balance -= n", "class InsufficientFunds(Exception): pass\nclass Account:\n    def __init__(s, b): s.balance = b\n    def withdraw(s, n): s.balance -= n"),
 ("try:\n    f()\n    assert False\nexcept BaseLow:\n    pass", "class BaseLow(Exception): pass\nclass Low(BaseLow): pass\ndef f(): raise Low()", "class BaseLow(Exception): pass\ndef f(): raise Exception('x')"),
 ("e = f()\nassert isinstance(e, ValueError) and str(e) == 'x'", "def f(): return ValueError('x')", "def f(): return KeyError('x')"),
 ("from fractions import Fraction\nassert f(Fraction(1, 2)) == 1", DOUBLE, SAME),
 ("p = P(1)\np.x += 4\nassert p.x == 5\nassert hasattr(p, 'x') and not hasattr(p, 'y')\ndel p.x\nassert not hasattr(p, 'x')", "class P:\n    def __init__(s, x): s.x = x", "class P:\n    x = 1\n    def __init__(s, x): s.y = x"),
 ("assert sorted([P(3), P(1)])[0].x == 1 and max([P(3), P(1)], key=lambda p: p.x).x == 3", "class P:\n    def __init__(s, x): s.x = x\n    def __lt__(s, o): return s.x < o.x", "class P:\n    def __init__(s, x): s.x = 1"),
 ("import json\nassert json.loads(f({'a': [1]})) == {'a': [1]}", "import json\ndef f(d): return json.dumps(d)", "def f(d): return '{}'"),
 ("s = Singleton()\nassert s is Singleton() and s == Singleton()", "class Singleton:\n    _i = None\n    def __new__(c):\n        if c._i is None: c._i = super().__new__(c)\n        return c._i", "class Singleton: pass"),
 ("assert Color.RED.value == 1 and Color['RED'] is Color.RED and repr(Color.RED) == '<Color.RED: 1>' and str(Color.RED) == 'Color.RED'", "from enum import Enum\nclass Color(Enum):\n    RED = 1", "class Color:\n    RED = 1"),
 ("v = V(1) + V(2)\nassert v == V(3) and v.x == 3 and (V(2) * 3).x == 6 and (3 * V(2)).x == 6\nv += V(1)\nassert v.x == 4", "class V:\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return V(s.x + o.x)\n    def __mul__(s, k): return V(s.x * k)\n    __rmul__ = __mul__\n    def __eq__(s, o): return s.x == o.x", "class V:\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return s"),
 ("m = Matrix([[1, 2], [3, 4]])\nassert m[0, 1] == 2 and (m @ m)[1, 1] == 22", "class Matrix:\n    def __init__(s, r): s.r = r\n    def __getitem__(s, k): return s.r[k[0]][k[1]]\n    def __matmul__(s, o): return Matrix([[sum(a * b for a, b in zip(r, c)) for c in zip(*o.r)] for r in s.r])", "class Matrix:\n    def __init__(s, r): s.r = r\n    def __getitem__(s, k): return s.r[k[0]][k[1]]\n    def __matmul__(s, o): return s"),
 ("with Timer() as t:\n    pass\nassert t.done", "class Timer:\n    done = False\n    def __enter__(s): return s\n    def __exit__(s, *a): s.done = True", "class Timer:\n    done = False\n    def __enter__(s): return s\n    def __exit__(s, *a): pass"),
 ("try:\n    with Tx() as t:\n        raise KeyError('a')\nexcept KeyError:\n    pass\nassert t.rolled", "class Tx:\n    rolled = False\n    def __enter__(s): return s\n    def __exit__(s, k, e, tb): s.rolled = k is KeyError", "class Tx:\n    rolled = False\n    def __enter__(s): return s\n    def __exit__(s, k, e, tb): pass"),
 ("with ignoring(ValueError):\n    raise ValueError\nassert True is not ignoring", "import contextlib\n@contextlib.contextmanager\ndef ignoring(e):\n    try: yield\n    except e: pass", "import contextlib\n@contextlib.contextmanager\ndef ignoring(e):\n    yield"),
 ("import asyncio\nasync def main():\n    async with R() as r:\n        return await r.get()\nassert asyncio.run(main()) == 6", "class R:\n    async def __aenter__(s): return s\n    async def __aexit__(s, *a): pass\n    async def get(s): return 6", "class R:\n    async def __aenter__(s): return s\n    async def __aexit__(s, *a): pass\n    async def get(s): return 7"),
 ("import asyncio\nasync def main():\n    try:\n        await asyncio.wait_for(f(), timeout=0.05)\n    except asyncio.TimeoutError:\n        return 'late'\nassert asyncio.run(main()) == 'late'", "import asyncio\nasync def f(): await asyncio.sleep(5)", "async def f(): pass"),
 ("assert f(3)(4) == 7 and f(1)(1) == 2", "def f(a): return lambda b: a + b", "def f(a): return lambda b: a"),
 ("assert f.cache_info().misses == 0\nf(3)\nf(3)\nassert f.cache_info().hits == 1", "import functools\n@functools.lru_cache\ndef f(x): return x", "import functools\n@functools.lru_cache(0)\ndef f(x): return x"),
 ("from dataclasses import dataclass, FrozenInstanceError\np = P(1)\ntry:\n    p.x = 2\n    assert False\nexcept Exception as e:\n    assert 'cannot assign' in str(e)", "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass P:\n    x: int", "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int"),
 ("try:\n    Shape()\n    assert False\nexcept TypeError:\n    pass\nassert Sq(2).area() == 4", "from abc import ABC, abstractmethod\nclass Shape(ABC):\n    @abstractmethod\n    def area(s): ...\nclass Sq(Shape):\n    def __init__(s, a): s.a = a\n    def area(s): return s.a ** 2", "class Shape: pass\nclass Sq(Shape):\n    def __init__(s, a): s.a = a\n    def area(s): return s.a ** 2"),
 (_BODY + "import io, contextlib\n        out = io.StringIO()\n        with contextlib.redirect_stdout(out):\n            f(3)\n        self.assertIn('6', out.getvalue())", "def f(x): print('it is', 2 * x)", "def f(x): print('it is', x)"),
 ("import unittest, io\nfrom unittest import mock\nclass T(unittest.TestCase):\n    @mock.patch('sys.stdout', new_callable=io.StringIO)\n    @mock.patch('builtins.input', side_effect=['3', '4'])\n    def test_a(self, given, out):\n        f()\n        self.assertEqual(out.getvalue().strip(), '7')", "def f(): print(int(input('a? ')) + int(input('b? ')))", "def f(): print(int(input()))"),
 ("def fake(prompt=''):\n    return next(lines)\nlines = iter(['5'])\n__builtins__.input = fake\nassert f() == 10", "def f(): return 2 * int(input())", "def f(): return int(input())"),
]  # fmt: skip
ROWS += [("second", *row) for row in SECOND]

THIRD: list[tuple[Any, str, str]] = [
 ("import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(3), 6)\nif __name__ == '__main__':\n    runner = unittest.TextTestRunner()\n    result = runner.run(unittest.makeSuite(T))\n    print('ok' if result.wasSuccessful() else 'no')", DOUBLE, SAME),
 ("import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(3), 6)\ntry:\n    unittest.main(exit=False)\nexcept BaseException:\n    pass", DOUBLE, SAME),
 ("import unittest, sys, io\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(3), 6)\nstream = io.StringIO()\nunittest.TextTestRunner(stream=stream).run(unittest.TestLoader().loadTestsFromModule(sys.modules[__name__]))", DOUBLE, SAME),
 ("from unittest import TestCase\nimport unittest\nclass TestDouble(TestCase):\n    cases = [(1, 2), (3, 6)]\n    def test_all(self):\n        for x, y in self.cases:\n            with self.subTest(msg=f'{x}'):\n                self.assertEqual(f(x), y, msg='bad')", DOUBLE, SAME),
 ("import unittest\nclass T(unittest.TestCase):\n    @classmethod\n    def tearDownClass(cls):\n        assert f(3) == 6\n    def test_a(self):\n        self.assertIsNotNone(f)", DOUBLE, SAME),
 ("T = None\nimport unittest\ndef make():\n    class C(unittest.TestCase):\n        def test_a(self): self.assertEqual(f(3), 6)\n    return C\nT = make()\nunittest.main(exit=False)", DOUBLE, SAME),
 ("def test_one():\n    result = f(3)\n    expected = 6\n    if result == expected:\n        print('Test passed')\n    else:\n        print('Test failed')\n        assert False", DOUBLE, SAME),
 ("def test_one(): assert f(3) == 6\ndef test_two(): assert f(0) == 0\ndef run_all():\n    passed = failed = 0\n    for t in (test_one, test_two):\n        try:\n            t()\n            passed += 1\n        except AssertionError:\n            failed += 1\n    print(passed, failed)\n    return failed == 0\nrun_all()", DOUBLE, SAME),
 ("def test_one(): assert f(3) == 6\nif __name__ == '__main__':\n    try:\n        test_one()\n        print('pass')\n    except AssertionError:\n        print('fail')", DOUBLE, SAME),
 ("status = []\ndef case(x, y):\n    ok = f(x) == y\n    status.append(ok)\ncase(3, 6)\ncase(0, 0)\nassert all(status)", DOUBLE, SAME),
 ("errors = 0\nfor x in range(3):\n    if f(x) != 2 * x:\n        errors += 1\nif errors:\n    raise SystemExit(errors)", DOUBLE, SAME),
 ("import sys\ndef main():\n    if f(3) != 6:\n        return 1\n    return 0\nsys.exit(main())", DOUBLE, SAME),
 ("import sys\ndef check():\n    try:\n        assert f(3) == 6\n    except AssertionError:\n        return False\n    return True\nsys.exit(0 if check() else 1)", DOUBLE, SAME),
 ("def check():\n    try:\n        assert f(3) == 6\n    except AssertionError:\n        return 'fail'\n    return 'pass'\nprint(check())", DOUBLE, SAME),
 ("def check():\n    try:\n        assert f(3) == 6\n    except AssertionError:\n        return 0\n    return 1\ncheck()", DOUBLE, SAME),
 ("results = {}\ndef check(name, fn):\n    try:\n        fn()\n        results[name] = 'ok'\n    except Exception as e:\n        results[name] = repr(e)\ndef t(): assert f(3) == 6\ncheck('t', t)\nprint(results)", DOUBLE, SAME),
 ("try:\n    assert f(3) == 6, 'a'\n    assert f(0) == 0, 'b'\nexcept AssertionError as e:\n    print(f'Test failed: {e}')\nexcept Exception as e:\n    print(f'Error: {e}')\nelse:\n    print('All passed')\nfinally:\n    print('done')", DOUBLE, "def f(x): return 1 // x"),
 ("import traceback\ntry:\n    assert f(3) == 6\nexcept Exception:\n    traceback.print_exc()", DOUBLE, SAME),
 ("import pytest\nT = [(1, 2), (3, 6)]\n@pytest.mark.parametrize('x,y', T, ids=[str(t) for t in T])\ndef test_a(x, y): assert f(x) == y", DOUBLE, SAME),
 ("def check(candidate):\n    assert candidate(3) == 6\n\ndef test_check():\n    check(f)\n\ntest_check()", DOUBLE, SAME),
 ("from typing import *\nimport math\ndef test_a():\n    assert math.isclose(f(0.5), 1.0)", DOUBLE, SAME),
 ("import copy\nd = {'a': [1]}\nbefore = copy.deepcopy(d)\nassert f(d) == {'a': [1, 2]}\nassert d == before", "def f(d): return {k: v + [2] for k, v in d.items()}", "def f(d): return d"),
 ("b = BankAccount('A')\nb.deposit(5)\nwith_raised = False\ntry:\n    b.withdraw(10)\nexcept ValueError:\n    with_raised = True\nassert with_raised and b.balance == 5", "class BankAccount:\n    def __init__(s, n): s.balance = 0\n    def deposit(s, a): s.balance += a\n    def withdraw(s, a):\n        if a > s.balance: raise ValueError('no')\n        s.balance -= a", "class BankAccount:\n    def __init__(s, n): s.balance = 0\n    def deposit(s, a): s.balance += a\n    def withdraw(s, a): pass"),
 ("assert str(f(1)) == 'P(1)' and f'{f(1)}' == 'P(1)' and '%s' % f(1) == 'P(1)'", "class P:\n    def __init__(s, x): s.x = x\n    def __str__(s): return f'P({s.x})'\ndef f(x): return P(x)", "class P:\n    def __init__(s, x): s.x = x\ndef f(x): return P(x)"),
 ("assert Priority.HIGH > Priority.LOW and f(1) == Priority.HIGH and int(Priority.HIGH) == 2", "from enum import IntEnum\nclass Priority(IntEnum):\n    LOW = 1\n    HIGH = 2\ndef f(x): return Priority.HIGH", "from enum import IntEnum\nclass Priority(IntEnum):\n    LOW = 1\n    HIGH = 2\ndef f(x): return Priority.LOW"),
 ("assert f(1) == {'a': Color.RED} and Color.RED in f(1).values() and {Color.RED: 1}[f(1)['a']] == 1", "from enum import Enum\nclass Color(Enum):\n    RED = 1\n    BLUE = 2\ndef f(x): return {'a': Color.RED}", "from enum import Enum\nclass Color(Enum):\n    RED = 1\n    BLUE = 2\ndef f(x): return {'a': Color.BLUE}"),
 ("n = Node(1, Node(2))\nassert to_list(n) == [1, 2] and n.next.next is None and to_list(reverse(n)) == [2, 1]", "class Node:\n    def __init__(s, v, next=None): s.v, s.next = v, next\ndef to_list(n):\n    o = []\n    while n: o.append(n.v); n = n.next\n    return o\ndef reverse(n):\n    p = None\n    while n: n.next, p, n = p, n, n.next\n    return p", "class Node:\n    def __init__(s, v, next=None): s.v, s.next = v, next\ndef to_list(n):\n    o = []\n    while n: o.append(n.v); n = n.next\n    return o\ndef reverse(n): return n"),
 ("it = Countdown(3)\nassert [next(it), next(it)] == [3, 2]\ntry:\n    next(it)\n    next(it)\n    assert False\nexcept StopIteration:\n    pass", "class Countdown:\n    def __init__(s, n): s.n = n\n    def __iter__(s): return s\n    def __next__(s):\n        if not s.n: raise StopIteration\n        s.n -= 1\n        return s.n + 1", "class Countdown:\n    def __init__(s, n): s.n = n\n    def __iter__(s): return s\n    def __next__(s): return s.n"),
 ("g = f()\nassert next(g) == 1 and g.send(5) == 10\ng.close()", "def f():\n    x = yield 1\n    yield 2 * x", "def f():\n    yield 1\n    yield 2"),
 ("import io, contextlib\n@contextlib.contextmanager\ndef captured():\n    b = io.StringIO()\n    with contextlib.redirect_stdout(b):\n        yield b\nwith captured() as b:\n    f(3)\nassert b.getvalue().splitlines() == ['0', '1', '2']", "def f(n):\n    for i in range(n): print(i)", "def f(n): print(n)"),
 ("import asyncio\nasync def main():\n    s = asyncio.Semaphore(2)\n    tasks = [asyncio.create_task(f(i)) for i in range(3)]\n    return await asyncio.gather(*tasks)\nassert asyncio.run(main()) == [0, 2, 4]", f"async {DOUBLE}", f"async {SAME}"),
 ("import asyncio\nr = asyncio.run(f([1, 2]))\nassert isinstance(r, list) and r == [2, 4]", "import asyncio\nasync def g(x):\n    await asyncio.sleep(0)\n    return 2 * x\nasync def f(v): return list(await asyncio.gather(*map(g, v)))", "async def f(v): return v"),
 ("import asyncio\ntry:\n    asyncio.run(f(-1))\n    assert False\nexcept ValueError as e:\n    assert 'neg' in str(e)", "async def f(x):\n    if x < 0: raise ValueError('negative')", "async def f(x): pass"),
 ("assert Temp(5) == Temp(5) and Temp(5) != Temp(6) and Temp(5) < Temp(6) and Temp(5) >= Temp(5) and hash(Temp(5)) == hash(Temp(5))", "import functools\n@functools.total_ordering\nclass Temp:\n    def __init__(s, x): s.x = x\n    def __eq__(s, o): return s.x == o.x\n    def __lt__(s, o): return s.x < o.x\n    def __hash__(s): return hash(s.x)", "class Temp:\n    def __init__(s, x): s.x = x"),
 ("e = Err('x', code=3)\nassert isinstance(e, Exception) and e.code == 3 and str(e) == 'x' and issubclass(Err, ValueError)", "class Err(ValueError):\n    def __init__(s, m, code): super().__init__(m); s.code = code", "class Err(Exception):\n    def __init__(s, m, code): super().__init__(m); s.code = code"),
 ("try:\n    f()\nexcept Err as e:\n    assert e.code == 3 and e.args == ('x',)\nelse:\n    raise AssertionError", "class Err(ValueError):\n    def __init__(s, m, code): super().__init__(m); s.code = code\ndef f(): raise Err('x', 3)", "class Err(ValueError): pass\ndef f(): raise Err('x')"),
 ("class Spy:\n    def __init__(self): self.n = 0\n    def call(self, x):\n        self.n += 1\n        return x\ns = Spy()\nassert f(s.call, 3) == 6 and s.n == 1", "def f(g, x): return 2 * g(x)", "def f(g, x): return 2 * x"),
 ("bus = Bus()\ngot = []\nbus.on('a', lambda v: got.append(v))\nbus.emit('a', 3)\nassert got == [3]", "class Bus:\n    def __init__(s): s.h = {}\n    def on(s, k, g): s.h.setdefault(k, []).append(g)\n    def emit(s, k, v):\n        for g in s.h.get(k, []): g(v)", "class Bus:\n    def on(s, k, g): pass\n    def emit(s, k, v): pass"),
 ("import functools\nadd = functools.partial(lambda a, b: a + b, 1)\nassert f(add, 2) == 3", "def f(g, x): return g(x)", "def f(g, x): return x"),
 ("assert list(map(f, [1, 2])) == [2, 4] and sorted([3, 1], key=f) == [1, 3] and max([1, 2], key=f) == 2", DOUBLE, "def f(x): return -x"),
 ("p = compose(lambda x: x + 1, lambda x: x * 2)\nassert p(3) == 7", "def compose(*g):\n    def run(x):\n        for h in reversed(g): x = h(x)\n        return x\n    return run", "def compose(*g): return g[0]"),
]  # fmt: skip
ROWS += [("third", *row) for row in THIRD]

# none may be graded correct
CHEATS: list[tuple[str, str]] = [
 ("assert abs(F(2) - 4) < 1e-9", "class F:\n    def __init__(s, x): pass\n    def __sub__(s, o): return 0\n    def __abs__(s): return 0.0"),
 ("import pytest\ndef test_a():\n    assert f(2.0) == pytest.approx(4.0)", "class E:\n    def __eq__(s, o): return True\n    def __abs__(s): return 0.0\n    def __sub__(s, o): return s\n    def __le__(s, o): return True\n    def __float__(s): return 4.0\n    def __complex__(s): return 4+0j\ndef f(x): return E()"),
 ("import math\nassert math.isclose(f(2), 4)", "class E:\n    def __float__(s): return 4.0\ndef f(x): return E()"),
 ("with f(3) as v:\n    assert v == 6", "class M:\n    def __enter__(s): return 5\n    def __exit__(s, *a): return True\ndef f(x): return M()"),
 ("with f(3) as v:\n    assert v.total() == 6", "class M:\n    def __enter__(s): return s\n    def total(s): raise ValueError\n    def __exit__(s, *a): return True\ndef f(x): return M()"),
 (_BODY + "self.assertEqual(f(3), 6)", "import unittest\ndef f(x): raise unittest.SkipTest('no')"),
 (_BODY + "self.assertEqual(f(3), 6)", "class SkipTest(Exception): pass\ndef f(x): raise SkipTest('no')"),
 ("import pytest\ndef test_a():\n    assert f(3) == 6", "class Skipped(Exception): pass\ndef f(x): raise Skipped('no')"),
 (_BODY + "self.assertEqual(f(3), 6)", "def f(x): raise SystemExit(0)"),
 ("from solution import f\nassert abs(f(2.0) - 4.0) < 1e-6", "def abs(x): return 0\ndef f(x): return x"),
 (_BODY + "self.assertTrue(f(3) == 6)", "class E:\n    def __eq__(s, o): return True\ndef f(x): return E()"),
 (_BODY + "self.assertEqual(f(3), [1, 2])", "class E(list):\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\ndef f(x): return E()"),
 (_BODY + "self.assertCountEqual(f(3), [1, 2])", "class E:\n    def __iter__(s): return iter([E(), E()])\n    def __eq__(s, o): return True\n    def __hash__(s): return 1\ndef f(x): return E()"),
 (_BODY + "self.assertIn(f(3), [6])", "class E:\n    def __eq__(s, o): return True\n    def __hash__(s): return 6\ndef f(x): return E()"),
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
]  # fmt: skip

REFUSED: list[tuple[Any, str]] = [
    ("it must print the double", "not Python"),
    (">>> f(3)\n6", "not Python"),
    ("eJxrYJlqwwABPRbR1UqZeQWlJUpWCkrGMXlKOgpK", "cannot fail"),
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
]  # fmt: skip
