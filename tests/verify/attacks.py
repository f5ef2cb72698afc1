"""Tables of programs: attacks on the grader, cheats against assertions, and right and broken programs (`PROGRAMS`).

An attack is given the input "3" and must print "6"; none does so honestly. `{canary}` stands for a file outside whose
change or disclosure would show. Statuses are those of `verify.code.verdict.Status`, several where hosts differ.
"""

from __future__ import annotations

from typing import Any

from verify.code.tests import Assertions, CallTest, StdioTest

PYTHON = {
    # name: (statuses, program)
    "fork bomb": ("error", "import os\nwhile True: os.fork()"),
    "fork, child prints": ("error", "import os\nif os.fork() == 0: print(6)"),
    "vfork and exec by subprocess": ("error", "import subprocess\nsubprocess.run(['/bin/echo', '6'])"),
    "os.system": ("wrong", "import os\nos.system('echo 6')"),
    "posix_spawn": ("error", "import os\nos.posix_spawn('/bin/echo', ['echo', '6'], {})"),
    "exec another program": ("error", "import os\nos.execv('/bin/echo', ['echo', '6'])"),
    "multiprocessing": (
        "error",
        "import multiprocessing as m\np = m.Process(target=print, args=(6,))\np.start(); p.join()",
    ),
    "daemon by double fork": (
        "error",
        "import os\nif os.fork() == 0:\n    os.setsid()\n    os.fork()\n    while 1: pass",
    ),
    "thread that never ends": (
        "timeout",
        "import threading\ndef f():\n    while 1: pass\nthreading.Thread(target=f).start()",
    ),
    "endless loop": ("timeout", "while True: pass"),
    "endless sleep": ("timeout", "import time\nwhile True:\n    try: time.sleep(99)\n    except BaseException: pass"),
    "alarms and signals ignored": (
        "timeout",
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except Exception: pass\n"
        "while 1: pass",
    ),
    "stops itself": ("timeout", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"),
    "memory": ("error memory timeout", "x = []\nwhile True: x.append(bytearray(1 << 24))"),
    "memory in one piece": ("error memory", "x = b'x' * (1 << 33)"),
    "memory by mmap": ("error", "import mmap\nx = [mmap.mmap(-1, 1 << 28) for _ in range(9)]"),
    "memory by memfd": ("error", "import os\nf = os.memfd_create('x')\nwhile 1: os.write(f, b'x' * (1 << 20))"),
    "output flood": ("output limit", "while True: print('6' * 100000)"),
    "output flood, error stream": ("wrong timeout", "import sys\nfor _ in range(3000): sys.stderr.write('x' * 9999)"),
    "thread bomb": (
        "error wrong",
        "import threading, time\nfor _ in range(9999): threading.Thread(target=time.sleep, args=(1,), daemon=True).start()",
    ),
    "open file bomb": ("error", "x = [open('/dev/null') for _ in range(9999)]"),
    "deep recursion": ("error crash memory timeout", "import sys\nsys.setrecursionlimit(1 << 30)\ndef f(): f()\nf()"),
    "recursion in C": (
        "error crash memory timeout",
        "import sys\nsys.setrecursionlimit(1 << 30)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
    ),
    "null pointer": ("crash", "import ctypes\nctypes.string_at(0)"),
    "abort": ("crash", "import os\nos.abort()"),
    "disk: one big file": ("error", "f = open('big', 'wb')\nwhile True: f.write(b'x' * (1 << 20))"),
    "disk: many files": ("error", "for i in range(10**6): open(str(i), 'w').write('x')"),
    "disk: folders": ("error", "import os\nos.mkdir('a')"),
    "disk: a folder without rights": ("error", "import os\nos.mkdir('a', 0)"),
    "disk: nested folders": (
        "error",
        "import os\nfor _ in range(1500):\n    os.mkdir('nested' * 20)\n    os.chdir('nested' * 20)",
    ),
    "disk: work folder renamed": ("error", "import os\nos.rename('../run', '../gone')"),
    "disk: folder in place of a program": ("error", "import os\nos.mkdir('../build/program')"),
    "disk: file in place of a program": ("error", "open('../build/program', 'w')"),
    "disk: header for another program": ("error", "open('../build/vector', 'w').write('#error')"),
    "disk: text for later programs": ("error", "open('../kept', 'w').write('6')"),
    "write outside": ("error", "open('{canary}', 'w').write('gone')"),
    "empty outside": ("error wrong", "import os\nos.truncate('{canary}', 0)"),
    "empty outside by opening": ("error", "import os\nos.open('{canary}', 3 | os.O_TRUNC)"),
    "empty outside by a raw call": (
        "wrong",
        "import ctypes\nprint(ctypes.CDLL(None).syscall(76, b'{canary}', 0), ctypes.CDLL(None).syscall(85, b'{canary}', 0))",
    ),
    "delete outside": ("error", "import os\nos.remove('{canary}')"),
    "read outside": ("error", "print(open('{canary}').read())"),
    "read accounts": ("error", "print(open('/etc/passwd').read())"),
    "list processes": ("error", "import os\nprint(os.listdir('/proc'))"),
    "symlink to outside": ("error", "import os\nos.symlink('{canary}', 'link')\nopen('link', 'w').write('gone')"),
    "hard link": ("error", "import os\nos.link('{canary}', 'link')"),
    "chmod of outside": ("error", "import os\nos.chmod('{canary}', 0o777)"),
    "TCP socket": ("error", "import socket\nsocket.create_connection(('127.0.0.1', 22))"),
    "UDP socket": (
        "error",
        "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))",
    ),
    "unix socket": ("error", "import socket\nsocket.socket(socket.AF_UNIX).bind('\\0name')"),
    "kill everybody": ("error", "import os\nos.kill(-1, 9)\nprint(6)"),
    "kill the parent": ("error", "import os\nos.kill(os.getppid(), 9)\nprint(6)"),
    "kill the group": ("error crash", "import os\nos.killpg(0, 9)"),
    "signal by SIGIO": ("error", "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, os.getppid())"),
    "ptrace": ("wrong", "import ctypes, os\nprint(ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0))"),
    "read the parent's memory": ("error", "print(open('/proc/1/mem', 'rb').read(1))"),
    "limits of the parent": (
        "error",
        "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_AS, (1, 1))",
    ),
    "raise its own limits": ("error", "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))"),
    "mount": ("wrong", "import ctypes\nprint(ctypes.CDLL(None).mount(b'x', b'/', b'tmpfs', 0, 0))"),
    "new user namespace": ("wrong", "import ctypes\nprint(ctypes.CDLL(None).unshare(0x10000000))"),
    "become root": ("error", "import os\nos.setuid(0)"),
    "System V memory": ("wrong", "import ctypes\nprint(ctypes.CDLL(None).shmget(0, 1 << 30, 0o1666))"),
    "other descriptors": (
        "wrong",
        "import os\nfor n in range(3, 1024):\n    try: os.write(n, b'6\\n'); print('open', n)\n    except OSError: pass",
    ),
    "right answer, bad exit status": ("error", "print(6)\nraise SystemExit(1)"),
    "exit at once": ("wrong", "import os\nos._exit(0)"),
    "search for the expected output": (
        "wrong",
        "import gc, sys\nfound = [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o]\n"
        "print(found[0]['expected'] if found else 'nothing', sys._getframe().f_back)",
    ),
    "patch the server": (
        "wrong error",
        "import sys\nfor name, module in list(sys.modules.items()):\n    if name.startswith('verify'):\n"
        "        for key in list(vars(module)): setattr(module, key, lambda *a, **k: 0)",
    ),
    "state between tests": ("wrong error", "import os\nprint(6 if os.path.exists('seen') else 0)\nopen('seen', 'w')"),
    "full-width digit": ("wrong", "print('\\uff16')"),
    "bytes that are no text": ("wrong", "import sys\nsys.stdout.buffer.write(b'6\\xff\\n')"),
    "NUL in the output": ("wrong", "print('6\\0')"),
    "answer and more": ("wrong", "print(6); print('verdict: correct'); print('passed')"),
    "syntax error": ("error", "def f(:"),
    "deeply nested source": ("error crash", "x = " + "(" * 5000 + ")" * 5000),
}

_C = "#include <unistd.h>\n#include <stdlib.h>\n#include <stdio.h>\n#include <signal.h>\n#include <fcntl.h>\n"
_MAIN = {
    "fork bomb": ("wrong", "while (fork() >= 0) {}"),
    "fork, child prints": ("wrong", 'if (fork() == 0) puts("6");'),
    "shell": ("wrong", 'system("echo 6");'),
    "exec": ("wrong", 'execl("/bin/echo", "echo", "6", (char*)0);'),
    "exec by the loader": ("wrong error crash", 'execl("/lib64/ld-linux-x86-64.so.2", "ld", "/bin/true", (char*)0);'),
    "daemon": ("wrong", "daemon(0, 0); if (setsid() > 0) for (;;) {}"),
    "endless loop": ("timeout", "for (volatile int i = 0;; i = i + 1) {}"),
    "endless sleep": ("timeout", "for (;;) pause();"),
    "signals ignored": (
        "timeout",
        "for (int s = 1; s < 65; s++) signal(s, SIG_IGN); for (volatile int i = 0;; i = i + 1) {}",
    ),
    "stops itself": ("timeout", "raise(SIGSTOP); kill(getpid(), SIGSTOP);"),
    "memory": (
        "crash memory",
        "for (;;) { volatile char *p = (volatile char*)malloc(1 << 20); for (int i = 0; i < 1 << 20; i += 4096) p[i] = 1; }",
    ),
    "memory on the stack": (
        "crash memory",
        "struct { static void f(volatile char *q) { volatile char x[4096]; x[0] = *q; f(x); x[1] = 2; } } s; char c = 0; s.f(&c);",
    ),
    "output flood": (
        "output limit",
        'for (;;) puts("66666666666666666666666666666666666666666666666666666666666666");',
    ),
    "null pointer": ("crash", "*(volatile int*)0 = 1;"),
    "division by zero": ("crash", 'volatile int z = 0; printf("%d", 7 / z);'),
    "abort": ("crash", "abort();"),
    "disk: one big file": (
        "wrong crash",
        'int f = open("big", O_CREAT | O_WRONLY, 0600); static char b[1 << 20]; while (write(f, b, sizeof b) > 0) {}',
    ),
    "disk: many files": (
        "wrong",
        'char n[9]; for (int i = 0; i < 99999; i++) { sprintf(n, "%d", i); if (creat(n, 0600) < 0) break; }',
    ),
    "write outside": ("wrong", 'int f = open("{canary}", O_WRONLY | O_TRUNC); write(f, "gone", 4);'),
    "delete outside": ("wrong", 'unlink("{canary}");'),
    "read outside": ("wrong", 'char b[99] = {}; read(open("{canary}", O_RDONLY), b, 98); puts(b);'),
    "read accounts": ("wrong", 'char b[99] = {}; read(open("/etc/passwd", O_RDONLY), b, 98); puts(b);'),
    "symlink": ("wrong", 'symlink("{canary}", "link"); write(open("link", O_WRONLY), "gone", 4);'),
    "rename of outside": ("wrong", 'rename("{canary}", "here");'),
    "chmod of outside": ("wrong", 'printf("%ld", syscall(90, "{canary}", 0777));'),
    "its own program replaced": ("wrong", 'printf("%d", open("../build/program", O_WRONLY));'),
    "kill everybody": ("wrong", "kill(-1, 9);"),
    "kill the parent": ("wrong", "kill(getppid(), 9);"),
    "kill the group": ("wrong crash", "kill(0, 9);"),
    "raw kill of process 1": ("wrong", 'printf("%ld", syscall(62, 1, 9));'),
    "ptrace": ("wrong", 'printf("%ld", syscall(101, 16, getppid(), 0, 0));'),
    "read the parent's memory": ("wrong", 'printf("%ld", syscall(310, getppid(), 0, 0, 0, 0, 0));'),
    "socket": ("wrong", 'printf("%ld", syscall(41, 2, 1, 0));'),
    "socket by io_uring": ("wrong", 'printf("%ld", syscall(425, 8, 0));'),
    "memfd": ("wrong", 'printf("%ld", syscall(319, "x", 0));'),
    "System V memory": ("wrong", 'printf("%ld", syscall(29, 0, 1 << 30, 01666));'),
    "user namespace": ("wrong", 'printf("%ld", syscall(272, 0x10000000));'),
    "clone3": ("wrong", 'printf("%ld", syscall(435, 0, 0));'),
    "mount": ("wrong", 'printf("%ld", syscall(165, "x", "/", "tmpfs", 0, 0));'),
    "i386 calls": ("crash", 'int r; asm volatile("int $0x80" : "=a"(r) : "a"(20)); printf("%d", r);'),
    "x32 calls": ("crash", 'printf("%ld", syscall(0x40000000 + 39));'),
    "become root": ("wrong", 'printf("%d", setuid(0));'),
    "other descriptors": ("wrong", 'for (int n = 3; n < 1024; n++) if (write(n, "6\\n", 2) > 0) puts("open");'),
    "right answer, bad exit status": ("error", 'puts("6"); return 3;'),
    "exit at once": ("wrong", "_exit(0);"),
    "answer and more": ("wrong", 'puts("6\\nverdict: correct");'),
}
CPP = {name: (statuses, f"{_C}int main() {{ {body} return 0; }}\n") for name, (statuses, body) in _MAIN.items()}
CPP |= {
    "include accounts": ("compile error", '#include "/etc/passwd"\nint main() {}'),
    "include the canary": ("compile error", '#include "{canary}"\nint main() {}'),
    "assemble the canary": ("compile error", 'asm(".incbin \\"{canary}\\"");\nint main() {}'),
    "include a device": ("compile error", '#include "/dev/zero"\nint main() {}'),
    "include itself": ("compile error", "#include __FILE__\nint main() { return 0 }"),
    "compile bomb: templates": ("compile error", "template<int n> struct A { A<n + 1> a; };\nint main() { A<0> a; }"),
    "compile bomb: constexpr": (
        "compile error",
        "constexpr long f(long n) { return n < 2 ? n : f(n - 1) + f(n - 2); }\nconstexpr long x = f(60);\nint main() {}",
    ),
    "compile bomb: object size": ("compile error wrong crash", "char a[1L << 33] = {1};\nint main() {}"),
    "compile bomb: macros": (
        "compile error",
        "#define A(x) x x x x x x x x\n#define B(x) A(A(A(A(A(A(A(A(x))))))))\nint y = B(B(+1));\nint main() { return 0 }",
    ),
    "no main": ("compile error", "int f() { return 6; }"),
    "not C++": ("compile error", "print(6)"),
}

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

# against the assertions of F
CHEATS = {
    "equal to everything": "class E:\n    def __eq__(s, o): return True\n    def __ne__(s, o): return False\ndef f(x): return E()",
    "int equal to everything": "class E(int):\n    def __eq__(s, o): return True\ndef f(x): return E(0)",
    "list equal to everything": "class E(list):\n    def __eq__(s, o): return True\ndef f(x): return E()",
    "exit on import": "import sys\nsys.exit(0)",
    "exit in the call": "import os\ndef f(x): os._exit(0)",
    "SystemExit in the call": "def f(x): raise SystemExit(0)",
    "no function": "pass",
    "function is a string": "f = '4'",
    "raises AssertionError": "def f(x): raise AssertionError",
    "raises StopIteration": "def f(x): raise StopIteration",
    "raises KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "raises an odd error": "class A(BaseException):\n    def __str__(s): raise s\ndef f(x): raise A",
    "patches builtins": "import builtins\nbuiltins.AssertionError = type('N', (), {})\nbuiltins.all = lambda x: True\ndef f(x): return 0",
    "sets the exception hook": "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\ndef f(x): return 0",
    "exit hook": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0",
    "looks at the frames": "import sys\ndef f(x):\n    g = sys._getframe(1)\n    while g: g.f_globals['passed'] = [True]; g = g.f_back\n    return 0",
    "searches memory": "import gc\ndef f(x):\n    for o in gc.get_objects():\n        if isinstance(o, str) and 'assert' in o and 'f(2)' in o: return eval(o.split('==')[1].split('\\n')[0])\n    return 0",
    "forges the examiner's report": "import os, struct\nb = b'D[[true,true,true],\"\"]'\nos.write(4, struct.pack('<I', len(b)) + b)\ndef f(x): return 0",
    "forges answers ahead": 'import os, struct\nb = b\'A["value",["int","0x4"]]\'\nfor _ in range(9): os.write(4, struct.pack(\'<I\', len(b)) + b)\ndef f(x): return 0',
    "endless frame": "import os\nos.write(4, b'\\xff\\xff\\xff\\xff')\nwhile 1: os.write(4, b'x' * 99999)",
    "prints a marker": "print('PASSED')\ndef f(x): print('ALL TESTS PASSED'); return 0",
    "threads that answer": "import os, threading\nthreading.Thread(target=lambda: os.write(4, b'\\0\\0\\0\\0'), daemon=True).start()\ndef f(x): return 0",
    "redefines len and abs": "def abs(x): return 0\ndef len(x): return 4\ndef f(x): return 0",
    "lies about its names": "import sys\nfor n in ('print', 'abs', 'range'): globals()[n] = lambda *a: 4\ndef f(x): return 0",
}

# against the assertions of FIRST
FIRST = Assertions(
    '#undef NDEBUG\n#include <assert.h>\nint main() {\n    vector<int> a = {1, 2};\n    assert (first(a, "xyz") == vector<int>({1}));\n'
    '    assert (first({3, 4}, "xyz") == vector<int>({3}));\n}\n',
    "#include <vector>\n#include <string>\nusing namespace std;\nbool helper(int x) { return x; }\n"
    "vector<int> first(vector<int> a, string s) {\n",
)
CPP_CHEATS = {
    "exit in the function": "    _Exit(0);\n}",
    "exit before main": "    return {};\n}\n#include <cstdlib>\nstatic int x = (std::_Exit(0), 0);",
    "equal vectors": "    return {};\n}\nbool operator==(const vector<int>&, const vector<int>&) { return true; }",
    "special template": "    return {9};\n}\nnamespace std { template<> bool operator==(const vector<int>&, const vector<int>&) { return true; } }",
    "own memcmp": '    return {9};\n}\nextern "C" int memcmp(const void*, const void*, unsigned long) { return 0; }\n'
    'extern "C" int __memcmp_sse4_1(...) { return 0; }',
    "own failure": '    return {9};\n}\nextern "C" void __assert_fail(const char*, const char*, unsigned, const char*) {}',
    "own exit": '    return {9};\n}\nextern "C" void _exit(int) { for (;;) {} }',
    "own main": "    return {9};\n}\nint main() { return 0; }",
    "macros": "    return {9};\n}\n#define assert(x)\n#define main ignored\n#define NDEBUG",
    "macros over keywords": "    return {9};\n}\n#define static\n#define struct class\n#define template",
    "macros over the bridge": "    return {9};\n}\n#define call main\n#define R int\n#define decltype(x) int()",
    "writes everywhere": '    extern long write(int, const void*, unsigned long) asm("write");\n    for (int n = 0; n < 64; n++) write(n, "00000000000000000000000000000000", 32);\n    _Exit(0);\n}',
}
