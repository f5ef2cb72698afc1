"""A chat whose tools this program runs: those of a ready environment, with any server of OpenAI's chat completions.

    python -m examples.server_tools.chat python "What is 2 ** 61 - 1 modulo 97?"

The calls run in the sandboxes of training and with their limits, and the results are the texts of training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

import httpx

from environments.environment import find, made
from environments.tools import ToolEnvironment
from shared.chat_endpoint import api_address
from shared.clean_text import clean
from shared.errors import ConfigError, InputError, ModelError, print_error, run_command
from shared.sections import RewardWeights
from shared.tool_calls import ParsedCall
from shared.types import Problem, Reward
from verify.plugins import Failed

CALLS_S = 30.0
"""seconds that the calls of a turn may take, as environment.step_s"""
ANSWER_S = 600.0
"""seconds that a turn of the model may take"""


async def no_grade(problem: Problem, text: str) -> Reward:
    """A chat has no reward."""
    raise RuntimeError("nothing is graded in a chat")


def tools_of(name: str, options: dict[str, Any]) -> ToolEnvironment:
    """Return a new instance of an environment with tools. Raises ConfigError."""
    known = find(name)
    assert known is not None
    environment = made(known.make, name, options, no_grade, RewardWeights())
    if not isinstance(environment, ToolEnvironment):
        raise ConfigError(f"the environment {name} has no tools")
    return environment


async def chat(
    server: httpx.AsyncClient, environment: ToolEnvironment, question: str, *, turns: int = 8, **body: Any
) -> list[dict[str, Any]]:
    """Return the messages of a chat: the model's calls are run until a turn has none, or `turns` are over. body: more
    fields of the requests. Raises ModelError for an error of the server, or of a tool that has no result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    try:
        await environment.reset(Problem("", question, ""), 0)
        tools = [{"type": "function", "function": tool._asdict()} for tool in environment.definitions]
        for _ in range(turns):
            reply = await server.post("chat/completions", json={"messages": messages, "tools": tools, **body})
            if reply.is_error:
                raise ModelError(f"{reply.url}: status {reply.status_code}, {reply.text[:500]}")
            messages.append(reply.json()["choices"][0]["message"])
            calls = messages[-1].get("tool_calls") or []
            async with asyncio.timeout(CALLS_S):
                for call in calls:
                    function = ParsedCall(call["id"], call["function"]["name"], call["function"]["arguments"])
                    result, _ = await environment.answer(function)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            if not calls:
                break
    except TimeoutError as error:
        raise ModelError(f"the calls of a turn took more than {CALLS_S:g} s") from error
    except (httpx.HTTPError, Failed) as error:
        raise ModelError(f"{type(error).__name__}: {error}") from error
    finally:
        await environment.close()
    return messages


async def ask(given: argparse.Namespace) -> int:
    """Print the calls of a chat, their results and the answer; return the exit code."""
    try:
        environment = tools_of(given.environment, given.options)
        headers = {"Authorization": f"Bearer {given.api_key}"}
        async with httpx.AsyncClient(base_url=api_address(given.url), headers=headers, timeout=ANSWER_S) as server:
            messages = await chat(server, environment, given.question, turns=given.turns, model=given.model)
    except InputError as error:
        return print_error(error)
    for message in messages[1:]:
        for call in message.get("tool_calls") or []:
            print(clean(f"[call] {call['function']['name']} {call['function']['arguments']}"))
        if message.get("content"):
            print(clean(f"[result] {message['content']}" if message["role"] == "tool" else message["content"]))
    if why := unanswered(messages[-1], given.turns):
        return print_error(ModelError(f"no answer: {why}"))
    return 0


def unanswered(last: dict[str, Any], turns: int) -> str:
    """Why a chat that ends with this message has no answer; "" for one that has."""
    if last["role"] == "tool":
        return f"the model still called tools after {turns} turns: raise --turns"
    if (last.get("content") or "").strip():
        return ""
    thought = " after its reasoning" if last.get("reasoning") or last.get("reasoning_content") else ""
    return f"the model's last turn is empty{thought}: ask again, or take a model that was trained to answer with tools"


def main(arguments: list[str]) -> int:
    """Ask one question."""
    parser = argparse.ArgumentParser(prog="python -m examples.server_tools.chat", description=__doc__.splitlines()[0])
    parser.add_argument("environment", help="a ready environment with tools: python, search or mcp")
    parser.add_argument("question")
    parser.add_argument("--options", type=json.loads, default={}, help='as JSON, e.g. {"corpus": "notes.jsonl"}')
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="address of the API (default: %(default)s)")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", default="", help="name of the model; empty for the server's own")
    parser.add_argument("--turns", type=int, default=8, help="turns of the model at most (default: 8)")
    return asyncio.run(ask(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
