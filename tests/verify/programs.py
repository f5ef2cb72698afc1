"""Programs with their tests, and the status of each test."""

from __future__ import annotations

from typing import Any

from verify.code.tests import Assertions, CallTest, StdioTest

TWICE = [StdioTest("3\n", "6\n"), StdioTest("-1\n", "-2\n")]
F = Assertions("assert f(2) == 4\nassert f(3) == 9\nassert f(10) == 100")

# programs, their tests, and the status of each test
PROGRAMS: list[tuple[str, Any, list[str]]] = [
    ("print(2 * int(input()))", TWICE, ["passed", "passed"]),
    ("\ufeffprint(2 * int(input()))", TWICE, ["passed", "passed"]),
    ("import sys\nfor x in sys.stdin: print(2 * int(x), end='')", TWICE, ["passed", "passed"]),
    ("import os\nos.write(1, str(2 * int(os.read(0, 99))).encode())", TWICE, ["passed", "passed"]),
    ("print(2 * int(open(0).read()))\nexit()", TWICE, ["passed", "passed"]),
    ("import sys, threading\nthreading.stack_size(1 << 27)\nsys.setrecursionlimit(10**6)\n"
     "def f(n): return 0 if n == 0 else 1 + f(n - 1)\n"
     "def main(): print(2 * int(input()) + f(50000) - 50000)\nthreading.Thread(target=main).start()",
     TWICE, ["passed", "passed"]),
    ("import atexit\natexit.register(lambda: print(2 * int(input())))", TWICE, ["passed", "passed"]),
    ("import asyncio\nasync def main(): print(2 * int(input()))\nasyncio.run(main())", TWICE, ["passed", "passed"]),
    ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(2 * A(int(input())).x)", TWICE, ["passed"] * 2),
    ("print(6)", TWICE, ["passed", "wrong"]),
    ("print(len(str(9 ** 9999)))", [StdioTest("", "9542")], ["passed"]),
    ("print(sum(map(int, input().split())))", [StdioTest(" ".join(["1"] * 500_000), "500000")], ["passed"]),
    ("print('x' * 1000000)", [StdioTest("", "x" * 1_000_000)], ["passed"]),
    ("def f(x): return x * x", [CallTest("f", [3], 9), CallTest("f", [3], 8)], ["passed", "wrong"]),
    ("class Solution:\n    def f(self, x): return x * x", [CallTest("Solution.f", [3], 9)], ["passed"]),
    ("def f(x, *, y): return {str(x): (y, None)}", [CallTest("f", [3], {"3": [1.5, None]}, {"y": 1.5})], ["passed"]),
    ("def f(x): print('talk'); return x", [CallTest("f", ["\U0001f600"], "\U0001f600")], ["passed"]),
    ("def f(x): raise ValueError", [CallTest("f", [3], 9)], ["error"]),
    ("def g(x): return 9", [CallTest("f", [3], 9)], ["error"]),
    ("def f(x): raise SystemExit(0)", [CallTest("f", [3], None)], ["error"]),
    ("import os\ndef f(x): os._exit(0)", [CallTest("f", [3], None)], ["error"]),
    ("def f(x):\n    while 1: pass", [CallTest("f", [3], None)], ["timeout"]),
    ("class E(int):\n    def __eq__(s, o): return True\ndef f(x): return E()", [CallTest("f", [3], 9)], ["wrong"]),
    ("def f(x):\n    y = []\n    y.append(y)\n    return y", [CallTest("f", [3], [])], ["error"]),
    ("import os\ndef f(x): os.write(4, b'\\x0d\\0\\0\\0A[\"value\",9]\\n')", [CallTest("f", [3], 9)], ["error", "wrong"]),
    ("def f(x): return x * x", F, ["passed"] * 3),
    ("def f(x): return x * x if x < 10 else 0", F, ["passed", "passed", "wrong"]),
    ("def sum(x): return 6", ["assert sum([1, 2, 3]) == 6"], ["passed"]),
    ("class P:\n    def __init__(s, a): s.a = a\ndef f(p): return p.a", ["assert f(P(3)) == 3"], ["passed"]),
    ("def f(): raise ValueError('x')", "try:\n    f()\n    ok = False\nexcept ValueError:\n    ok = True\nassert ok", ["passed"] * 2),
]  # fmt: skip

FIRST = Assertions(
    '#undef NDEBUG\n#include <assert.h>\nint main() {\n    vector<int> a = {1, 2};\n    assert (first(a, "xyz") == vector<int>({1}));\n'
    '    assert (first({3, 4}, "xyz") == vector<int>({3}));\n}\n',
    "#include <vector>\n#include <string>\nusing namespace std;\nbool helper(int x) { return x; }\n"
    "vector<int> first(vector<int> a, string s) {\n",
)
