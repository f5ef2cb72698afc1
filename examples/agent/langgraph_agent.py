"""The agent of agent.py as a graph of LangGraph: one node asks the model, one runs the tool, until the game is over."""

from __future__ import annotations

import random
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

NUMBERS, GUESSES = 8, 4


def play(problem: dict[str, Any], base_url: str, api_key: str) -> float:
    """Play one game. Return the reward: 1 if the model finds the number within its guesses, else 0."""
    hidden = random.Random(problem["seed"]).randint(1, NUMBERS)
    guesses: list[int] = []

    def guess(number: int) -> str:
        """Compare a number with the hidden one."""
        guesses.append(number)
        return "right" if number == hidden else "higher" if number < hidden else "lower"

    tools = [tool(guess)]
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, timeout=3600, max_retries=0)
    asks = model.bind_tools(tools)

    def ask(state: MessagesState) -> dict[str, list[AIMessage]]:
        return {"messages": [asks.invoke(state["messages"])]}

    def is_over(state: MessagesState) -> str:
        return "__end__" if hidden in guesses or len(guesses) >= GUESSES else "ask"

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_conditional_edges("tools", is_over)
    graph.compile().invoke({"messages": [HumanMessage(problem["text"])]})
    return float(hidden in guesses[:GUESSES])
