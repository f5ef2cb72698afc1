"""Solutions and the program in them: fences in lists and quotations, of tildes, nested, with words behind (two rounds)."""

from __future__ import annotations

P = "print(1)\n"
FIRST: list[tuple[str, tuple[str, str] | None]] = [
    ("1. Here:\n\n    ```python\n    print(1)\n    ```", ("python", P)),
    ("- Here:\n  ```python\n  print(1)\n  ```", ("python", P)),
    ("* a\n  * b\n\n    ```py\n    print(1)\n    ```\n", ("py", P)),
    ("- ```python\n  print(1)\n  ```", ("python", P)),
    ("1.\tHere:\n\n\t```python\n\tprint(1)\n\t```", ("python", P)),
    ("- a\n\n\t```python\n\tprint(1)\n\t```", ("python", P)),
    ("  ```python\n  print(1)\n  ```", ("python", P)),
    ("   ~~~python\n   if 1:\n       print(1)\n   ~~~", ("python", "if 1:\n    print(1)\n")),
    (
        "1. Here:\n\n    ```python\n    def f():\n        return 1\n\n    print(f())\n    ```",
        ("python", "def f():\n    return 1\n\nprint(f())\n"),
    ),
    ("> ```python\n> print(1)\n> ```", ("python", P)),
    ("~~~python\nprint(1)\n```\n~~~", ("python", "print(1)\n```\n")),
    ('```python title="a.py" {1,3}\nprint(1)\n```', ("python", P)),
    ("``` python\nprint(1)\n```", ("python", P)),
    ("```{.python .numberLines}\nprint(1)\n```", ("python", P)),
    ("~~~ python `x`\nprint(1)\n~~~", ("python", P)),
    ("````text\n```python\nprint(1)\n```\n````\n```python\nprint(2)\n```", ("text", "```python\nprint(1)\n```\n")),
    ("```\n~~~python\nprint(1)\n~~~\n```", None),
    ("```python\nprint(1)\n", None),
    ("1. a\n\n   ```python\n   print(1)\n   ```\n\n2. b", ("python", P)),
    ("10. Here:\n\n    ```python\n    print(1)\n    ```", ("python", P)),
    ("Text.\n\n    ```python\n    print(1)\n    ```\n", None),
    ("```python\n    ```\nprint(1)\n```", ("python", "    ```\nprint(1)\n")),
    ("- Here:\n  ```python\n  print(1)\n```", ("python", P)),
    ("```python\nx = '''\n    ```\n'''\nprint(1)\n```", ("python", "x = '''\n    ```\n'''\nprint(1)\n")),
]

SECOND: list[tuple[str, tuple[str, str] | None]] = [
    ("1. a\n2. b\n   1. c\n\n      ```python\n      print(1)\n      ```", ("python", P)),
    ("+ a\n\n  ~~~python\n  print(1)\n  ~~~", ("python", P)),
    ("1) a\n   ```python\n   print(1)\n   ```", ("python", P)),
    ("> - a\n>   ```python\n>   print(1)\n>   ```", ("python", P)),
    ("`````python\n````\nprint(1)\n`````", ("python", "````\nprint(1)\n")),
    ("- a\n    ```python\n    print(1)\n    ```", ("python", P)),
    ("1. a\n     ```python\n     print(1)\n     ```", ("python", P)),
    ("**Code:**\n ```python\n print(1)\n ```", ("python", P)),
    (
        "- a\n\n  b\n\n  ```python\n  for i in range(2):\n      print(i)\n  ```\n\n  c",
        ("python", "for i in range(2):\n    print(i)\n"),
    ),
    ("```python\n- a\n  ```\nprint(1)\n```", ("python", "- a\n")),
    ("```Python3 run=true\nprint(1)\n```", ("python3", P)),
    ("- a\n\nText.\n\n    ```python\n    print(1)\n    ```", None),
]
