"""C++ programs that change the comparison in memory, which they share with their tests, and right ones beside them."""

from __future__ import annotations

from verify.code.tests import Assertions

# against the assertions of `attacks.FIRST`: the comparison in memory is changed before `main`, by programs that know nothing of the tests
_PATCH = r"""    return {9};
}
#include <cstring>
#include <csignal>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>
static int nothing(const void*, const void*, unsigned long) { return 0; }
static char *page(void *at) { return (char*)((unsigned long)at & -4096UL); }
static void **jump(unsigned char *stub) {  // where a stub has its target from
    for (int i = 0; i < 16; i++, stub++) if (stub[0] == 0xff && stub[1] == 0x25) return (void**)(stub + 6 + *(int*)(stub + 2));
    return 0;
}
static void **entry() { unsigned char *stub; asm("lea memcmp@PLT(%%rip), %0" : "=r"(stub)); return jump(stub); }
static char *code() { void **at = jump((unsigned char*)&memcmp); return at ? (char*)*at : (char*)&memcmp; }
static char zero[] = "\x31\xc0\xc3", page_copy[8192];
static void redirect() { if (entry()) *entry() = (void*)nothing; }
static void patch() { memcpy(code(), zero, 3); }
static char *patched(char *at) { char *old = code(); memcpy(at, page(old), 8192); memcpy(at + (old - page(old)), zero, 3); return at; }
static char *moved(char *at) { char *old = (char*)entry(); memcpy(at, page(old), 4096); *(void**)(at + (old - page(old))) = (void*)nothing; return at; }
static char *fresh(void *at, int rights) { return (char*)mmap(at, 8192, rights, MAP_PRIVATE | MAP_ANONYMOUS | (at ? MAP_FIXED : 0), -1, 0); }
__attribute__((constructor)) static void attack() { BODY }
"""
_STEPS = """struct sigaction s = {}; s.sa_flags = SA_SIGINFO; s.sa_sigaction = [](int, siginfo_t*, void *c) {
    auto &r = ((ucontext_t*)c)->uc_mcontext.gregs; r[REG_EFL] |= 0x140; if (*(short*)r[REG_RIP] == (short)0xc085) r[REG_RAX] = 0; };
    sigaction(SIGTRAP, &s, 0); asm volatile("pushfq; orq $0x100, (%rsp); popfq");"""
_PATCHES = {
    "code patched": "if (!mprotect(page(code()), 8192, 7)) patch();",
    "code patched, writable first": "if (!mprotect(page(code()), 8192, 3)) { patch(); mprotect(page(code()), 8192, 5); }",
    "code patched by a raw call": "if (!syscall(10, page(code()), 8192, 7)) patch();",
    "code patched with a key": "if (!syscall(329, page(code()), 8192, 7, -1)) patch();",
    "stub patched": "if (!mprotect(page((void*)&memcmp), 8192, 7)) memcpy((void*)&memcmp, zero, 3);",
    "code replaced": "patched(page_copy); char *at = page(code()); if (fresh(at, 7) == at) memcpy(at, page_copy, 8192);",
    "code moved in": "char *q = patched(fresh(0, 3)); mprotect(q, 8192, 5); mremap(q, 8192, 8192, 3, page(code()));",
    "table changed": "redirect();",
    "table made writable": "if (entry() && !mprotect(page(entry()), 4096, 3)) redirect();",
    "table replaced": "if (entry()) { moved(page_copy); char *at = page(entry()); mmap(at, 4096, 3, 50, -1, 0); memcpy(at, page_copy, 4096); }",
    "table moved in": "if (entry()) mremap(moved(fresh(0, 3)), 4096, 4096, 3, page(entry()));",
    "table read again from the file": "if (entry()) { madvise(page(entry()), 4096, MADV_DONTNEED); redirect(); }",
    "memory as a file": 'pwrite(open("/proc/self/mem", O_RDWR), zero, 3, (long)code());',
    "memory of a process": "iovec a{zero, 3}, b{code(), 3}; process_vm_writev(getpid(), &a, 1, &b, 1, 0);",
    "memory of a traced process": "syscall(101, 0, 0, 0, 0); syscall(101, 5, getpid(), code(), 0xc3c031);",
    "every comparison stepped through": _STEPS,
    "tables of all libraries": """dl_iterate_phdr([](dl_phdr_info *o, size_t, void*) {
    for (int i = 0; i < o->dlpi_phnum; i++) if (o->dlpi_phdr[i].p_type == PT_LOAD && o->dlpi_phdr[i].p_flags & 2) {
        char *from = page((void*)(o->dlpi_addr + o->dlpi_phdr[i].p_vaddr)), *to = from + o->dlpi_phdr[i].p_memsz;
        mprotect(from, to - from, 3);
        for (void **p = (void**)from; (char*)(p + 1) <= to; p++) if (*p == code()) *p = (void*)nothing;
    }
    return 0; }, 0);""",
}  # fmt: skip
CPP_PATCHES = {name: _PATCH.replace("BODY", body) for name, body in _PATCHES.items()}
_LATE, _WRITABLE = _PATCH.replace("BODY", ""), _PATCH.replace("BODY", "patch();")
CPP_PATCHES |= {
    "code made writable": _WRITABLE + 'asm(".section .text.mine,\\"awx\\",@progbits\\n nop\\n.text");',
    "all code made writable": _WRITABLE + 'asm(".section .fini,\\"awx\\",@progbits\\n.text");',
    "constants made writable": _LATE + 'asm(".section .rodata.mine,\\"aw\\",@progbits\\n.byte 0\\n.text");',
    "indirect function": _LATE + 'extern "C" { static auto choose() { redirect(); return nothing; }\n'
    'int mine(const void*, const void*, unsigned long) __attribute__((ifunc("choose"))); }\nint use = mine("", "", 0);',
    "relocation": _LATE + 'extern "C" { void *choose() { redirect(); return (void*)nothing; } void *spare; }\n'
    'asm(".section .rela.plt,\\"a\\",@progbits\\n.quad spare, 37, choose\\n.text");',
    "before the tables are closed": _LATE + '__attribute__((section(".preinit_array"), used)) static void (*early)() = redirect;',
}  # fmt: skip

_HEAD = "#include <bits/stdc++.h>\nusing namespace std;\n"
# right programs that map memory, start threads or stand in unusual sections: head, body and tests
CPP_RIGHT = {
    "function": ("int twice(function<int(int)> g, int x)", "return g(g(x)); }", "twice([](int a) { return a + 3; }, 1) == 7"),
    "threads": ("int f(int n)", "vector<thread> t; atomic<int> a{0}; mutex m;\n"
        "for (int i = 0; i < n; i++) t.emplace_back([&] { vector<int> v(99999, 1); lock_guard l(m); a += v[i % 9]; });\n"
        "for (auto &x : t) x.join(); return a + async(launch::async, [] { return 1; }).get(); }", "f(8) == 9"),
    "memory that grows": ("long f(long n)", "vector<long> v; for (long i = 0; i < n; i++) v.push_back(i);\n"
        "char *p = 0; for (int i = 12; i < 27; i++) { p = (char*)realloc(p, 1L << i); p[(1L << i) - 1] = 1; }\n"
        "free(p); return accumulate(v.begin(), v.end(), 0L); }", "f(3000000) == 4499998500000"),
    "exceptions": ("int f(int n)", 'try { if (n < 0) throw invalid_argument("x"); } catch (exception &e) { return 1; } return 0; }', "f(-1) == 1"),
    "text": ("string f(double x)", 'stringstream s; s << fixed << setprecision(2) << x; smatch m; string t = s.str();\n'
        'regex_match(t, m, regex("([0-9]+)[.]([0-9]+)")); return t + m[2].str(); }', 'f(2.5) == "2.5050"'),
    "objects with a life": ("int f(int n)", "struct B { virtual int go() { return 1; } virtual ~B() {} };\n"
        "struct D : B { int go() override { return 2; } }; static map<int, int> memo; thread_local int calls = 0;\n"
        "static int made = [] { return 4; }(); unique_ptr<B> b(new D); return ++memo[n] + ++calls + made + b->go(); }", "f(1) == 8 && f(1) == 10"),
    "a signal ignored": ("int f(int n)", "signal(SIGINT, SIG_IGN); return n; }", "f(3) == 3"),
    "copies for processors": ("int f(int n)", 'return n; }\n__attribute__((target_clones("avx2", "default"))) int g() { return 1; }\n'
        '[[gnu::target_clones("avx2", "default")]] int h() { return 2; }', "f(3) == 3"),
    "templates": ("string f(string a, string b)", "auto add = []<typename T>(T x, T y) { return x + y; };\n"
        "return add(a, b) + to_string(add(1, 2)); }", 'f("a", "b") == "ab3"'),
}  # fmt: skip
CPP_RIGHT_TESTS = {
    name: (body, Assertions(f"int main() {{ assert({test}); }}\n", f"{_HEAD}{head} {{\n"))
    for name, (head, body, test) in CPP_RIGHT.items()
}
