"""Prompts of an evaluation: a problem, and the form that its answer must have, in the problem's language."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shared.types import Problem
from verify.calls import plain_schema, tool_name
from verify.code.exam import language_of, read_tests

BOXED = {
    "en": r"Put your final answer in \boxed{}.",
    "fr": r"Mets ta réponse finale dans \boxed{}.",
    "de": r"Schreibe deine endgültige Antwort in \boxed{}.",
    "es": r"Escribe tu respuesta final dentro de \boxed{}.",
    "it": r"Scrivi la risposta finale in \boxed{}.",
    "ru": r"Запиши окончательный ответ в \boxed{}.",
    "zh": r"请把最终答案写在 \boxed{} 中。",
}
"""language -> the sentence that asks for an answer"""
PROGRAM = {
    "en": "Give the complete program with all its imports in one Markdown code block that begins with {0}.",
    "fr": "Donne le programme complet, imports compris, dans un seul bloc de code Markdown qui commence par {0}.",
    "de": "Gib das vollständige Programm mit allen Importen in einem Markdown-Codeblock an, der mit {0} beginnt.",
    "es": "Da el programa completo, con sus importaciones, en un solo bloque de código Markdown que empiece por {0}.",
    "it": "Dai il programma completo, import compresi, in un unico blocco di codice Markdown che inizia con {0}.",
    "ru": "Приведи программу целиком, с импортами, в одном блоке кода Markdown, который начинается с {0}.",
    "zh": "请给出完整的程序（包括所有导入），放在一个以 {0} 开头的 Markdown 代码块中。",
}
"""language -> the sentence that asks for a program; {0} is the fence"""
HEAD = "Complete this Python function."
CALLS = """You can call these functions:

```json
{functions}
```

{request}

Answer with the calls that this needs as a JSON list, in one Markdown code block that begins with ```json:

[{{"name": "...", "arguments": {{...}}}}]

If none of the functions can do what is asked, give the empty list []."""


def ask_answer(problem: Problem) -> str:
    """Return a prompt that asks for a final answer in a box."""
    return f"{problem.text}\n\n{BOXED.get(problem.language, BOXED['en'])}"


def ask_program(problem: Problem) -> str:
    """Return a prompt that asks for a program in a fenced block, in the language of the tests."""
    language = language_of(read_tests(problem.tests)) or "python"
    text = problem.text
    if isinstance(problem.tests, Mapping) and problem.tests.get("prefix") == text:  # HumanEval: nothing but a head
        text = f"{HEAD}\n\n```python\n{text.rstrip()}\n```"
    return f"{text.rstrip()}\n\n{PROGRAM.get(problem.language, PROGRAM['en']).format(f'```{language}')}"


def ask_calls(problem: Problem, functions: list[dict[str, Any]]) -> str:
    """Return a prompt that lists the functions and asks for calls as JSON."""
    listed = json.dumps(plain_schema(functions), ensure_ascii=False, indent=1)
    return CALLS.format(functions=listed, request=problem.text)


def tools_of(functions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the functions as tools of OpenAI's API."""
    return [
        {"type": "function", "function": {**plain_schema(one), "name": tool_name(one["name"])}} for one in functions
    ]
