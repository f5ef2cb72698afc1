"""C++ assertions whose prefix does not give the types: programs that are right (True) or cheat or err (False)."""

from __future__ import annotations

from verify.code.tests import Assertions

_ASSERT = "#include <cassert>\n"
SQUARE = Assertions(
    _ASSERT + "int main() {\n    assert(candidate(2) == 4);\n    assert(candidate(3) == 9);\n}\n", language="cpp"
)
WORDS = Assertions(
    '#include <bits/stdc++.h>\nusing namespace std;\nint main() {\n    assert(words("a b") == vector<string>({"a", "b"}));\n'
    '    assert(words("").empty());\n    auto found = words("x");\n    assert(found.size() == 1 && found[0] == "x");\n}\n',
    language="cpp",
)
LARGEST = Assertions(
    'int main() {\n    assert(largest(vector<int>{3, 1, 2}) == 3);\n    assert(largest(vector<string>{"a", "b"}) == "b");\n}\n',
    "#include <bits/stdc++.h>\nusing namespace std;\ntemplate <typename T>\nT largest(vector<T> items) {\n",
    language="cpp",
)
HALF = Assertions(
    "int main() {\n    assert(fabs(half(3) - 1.5) < 1e-9);\n    assert(half(8) == 4);\n}\n",
    "#include <bits/stdc++.h>\nusing namespace std;\nauto half(int x) {\n",
    language="cpp",
)
TWO = Assertions(
    "#include <cassert>\nint main() { assert(add(1, 2) == 3); assert(twice(4) == 8); return 0; }", language="cpp"
)
_STD = "#include <bits/stdc++.h>\nusing namespace std;\n"
_SPLIT = "vector<string> words(string s) { stringstream in(s); vector<string> out; string w; while (in >> w) out.push_back(w); return out; }\n"
_CLASS = "struct N { int v; bool operator==(int) const { return true; } };\n"

FIRST: list[tuple[Assertions, str, bool]] = [
    (SQUARE, "int candidate(int x) { return x * x; }", True),
    (SQUARE, "#include <iostream>\nlong long candidate(long long x) { return x * x; }", True),
    (SQUARE, "static inline int candidate(const int& x) { return x * x; }", True),
    (SQUARE, "double candidate(double x) { return x * x; }", True),
    (SQUARE, "int helper(int x) { return x; }\nint candidate(int x) { return helper(x) * x; }", True),
    (SQUARE, "int candidate(int x, int times = 1) { return times > 1 ? x : x * x; }", True),
    (SQUARE, "int candidate(int x) { return x + 2; }", False),
    (SQUARE, _CLASS + "N candidate(int) { return {}; }", False),
    (SQUARE, "#define assert(x)\nint candidate(int) { return 0; }", False),
    (SQUARE, "int candidate(int) { return 0; }\n#define assert(...) ((void)0)\n#define NDEBUG", False),
    (
        SQUARE,
        'int candidate(int) { return 0; }\n#define main ignored\nint real() asm("main"); int real() { return 0; }',
        False,
    ),
    (SQUARE, "#include <cstdlib>\nint candidate(int) { _Exit(0); }", False),
    (SQUARE, "#include <cstdlib>\nint candidate(int) { std::exit(0); }", False),
    (
        SQUARE,
        "#include <cstdlib>\nint candidate(int) { return 0; }\n__attribute__((constructor)) void early() { _Exit(0); }",
        False,
    ),
    (
        SQUARE,
        "#include <cstdlib>\nint candidate(int) { return 0; }\nstruct S { S() { std::quick_exit(0); } } s;",
        False,
    ),
    (
        SQUARE,
        'int candidate(int) { return 0; }\nextern "C" void _exit(int) { for (;;); }\nextern "C" void abort() { }',
        False,
    ),
    (SQUARE, '#include <cstdio>\n#include <cstdlib>\nint candidate(int) { puts("all tests passed"); exit(0); }', False),
    (
        SQUARE,
        "struct E { template <class T> friend bool operator==(const E&, const T&) { return true; } };\nE candidate(int) { return {}; }",
        False,
    ),
    (
        SQUARE,
        "struct C { operator int() const { static int n = 0; return n++ ? 9 : 4; } };\nC candidate(int) { return {}; }",
        False,
    ),
    (SQUARE, "#define candidate(x) ((x) * (x))\nint y;", False),
    (SQUARE, "#define int struct Z { Z(...); } \nint candidate(int) { }", False),
    (WORDS, _STD + _SPLIT, True),
    (WORDS, _STD + _SPLIT.replace("string s", "const string& s"), True),
    (WORDS, _STD + "vector<string> words(string s) { return {s}; }", False),
    (
        WORDS,
        _STD
        + "vector<string> words(string s) { return {s}; }\nbool operator==(const vector<string>&, const vector<string>&) { return true; }",
        False,
    ),
    (
        WORDS,
        _STD
        + "template <> bool vector<string>::empty() const noexcept { return true; }\nvector<string> words(string s) { return {s}; }\nnamespace std { template <> bool operator==(const vector<string>&, const vector<string>&) { return true; } }",
        False,
    ),
    (
        WORDS,
        _STD
        + "struct V : vector<string> { V(string s) : vector<string>{s} {} bool empty() const { return true; } };\nbool operator==(const V&, const vector<string>&) { return true; }\nV words(string s) { return V(s); }",
        False,
    ),
    (LARGEST, "    return *max_element(items.begin(), items.end());\n}", True),
    (
        LARGEST,
        "template <typename T>\nT largest(vector<T> items) {\n    T best = items[0];\n    for (auto& i : items) best = max(best, i);\n    return best;\n}",
        True,
    ),
    (LARGEST, "    return items[0];\n}\nbool operator==(const string&, const char*) { return true; }", False),
    (LARGEST, "    _Exit(0);\n}", False),
    (LARGEST, "    return items[0];\n}\n#define assert(x)", False),
    (
        LARGEST,
        '    return T();\n}\n#pragma push_macro("assert")\n#define main(...) main() { return 0; } int other(__VA_ARGS__)',
        False,
    ),
    (HALF, "    return x / 2.0;\n}", True),
    (HALF, "auto half(int x) -> double { return x * 0.5; }", True),
    (HALF, "    return x / 2;\n}", False),
    (HALF, "    return x / 2;\n}\n#define fabs(x) 0", False),
    (
        HALF,
        "    struct D { bool operator==(int) { return true; } double operator-(double) { return 0; } };\n    return D();\n}",
        False,
    ),
    (TWO, "int add(int a, int b) { return a + b; }\nint twice(int a) { return 2 * a; }", True),
    (TWO, "int add(int a, int b) { return a + b; }\nint twice(int a) { return a; }", False),
    (TWO, "int add(int a, int b) { return a + b; }", False),
]

COUNT = Assertions(
    "int main() {\n    assert(tally(vector<int>{1, 1, 2})[1] == 2);\n    assert(tally({}).empty());\n}\n",
    language="cpp",
)
PAIR = Assertions(
    "#include <bits/stdc++.h>\nint main() { auto [low, high] = range_of({3, 1, 2}); assert(low == 1 && high == 3); }",
    "#include <bits/stdc++.h>\nusing namespace std;\n",
    "range_of",
    "cpp",
)
ADD = Assertions(
    'int main() { assert(add(1, 2) == 3); assert(add(string("a"), string("b")) == "ab"); }',
    "#include <bits/stdc++.h>\nusing namespace std;\ntemplate <class T>\nT add(T a, T b) {\n",
    "add",
    "cpp",
)
STACK = Assertions("#include <cassert>\nint main() { Stack s; s.push(1); assert(s.top() == 1); }", language="cpp")

SECOND: list[tuple[Assertions, str, bool]] = [
    (COUNT, _STD + "map<int, int> tally(vector<int> v) { map<int, int> m; for (int x : v) m[x]++; return m; }", True),
    (
        COUNT,
        _STD
        + "unordered_map<int, int> tally(const vector<int>& v) { unordered_map<int, int> m; for (int x : v) m[x]++; return m; }",
        True,
    ),
    (
        COUNT,
        _STD
        + "struct M { int operator[](int) { return 2; } bool empty() { return true; } };\nM tally(vector<int>) { return {}; }",
        False,
    ),
    (
        COUNT,
        _STD
        + "namespace std { struct M { int operator[](int) { return 2; } bool empty() { return true; } }; }\nM tally(vector<int>) { return {}; }",
        False,
    ),
    (
        COUNT,
        _STD
        + "template <> int& map<int, int>::operator[](int&&) { static int two = 2; return two; }\nmap<int, int> tally(vector<int>) { return {}; }",
        False,
    ),
    (
        PAIR,
        "pair<int, int> range_of(vector<int> v) { return {*min_element(v.begin(), v.end()), *max_element(v.begin(), v.end())}; }",
        True,
    ),
    (PAIR, "pair<int, int> range_of(vector<int> v) { return {v[0], v[1]}; }", False),
    (PAIR, "struct P { int a, b; };\nP range_of(vector<int> v) { return {1, 3}; }", False),
    (ADD, "    return a + b;\n}", True),
    (ADD, "template <class T>\nT add(T a, T b) { T c = a; c += b; return c; }", True),
    (ADD, "    return a;\n}", False),
    (ADD, "    return a;\n}\ntemplate <> int add(int, int) { std::_Exit(0); }", False),
    (SQUARE, "#define int long long\nint candidate(int x) { return x * x; }", True),
    (SQUARE, "auto candidate(int x) { return x * x; }", True),
    (SQUARE, "bool candidate(int x) { return true; }\nbool operator==(bool, struct Q&);", False),
    (
        SQUARE,
        "#include <any>\nstd::any candidate(int x) { return 4; }\nbool operator==(const std::any&, int) { return true; }",
        False,
    ),
    (
        SQUARE,
        "#include <signal.h>\n#include <stdlib.h>\nint candidate(int) { signal(SIGABRT, [](int) { _Exit(0); }); abort(); }",
        False,
    ),
    (
        SQUARE,
        "#include <unistd.h>\n#include <sys/syscall.h>\nint candidate(int) { syscall(SYS_exit_group, 0); return 0; }",
        False,
    ),
    (
        STACK,
        "#include <vector>\nstruct Stack { std::vector<int> v; void push(int x) { v.push_back(x); } int top() { return v.back(); } };",
        False,
    ),
]
