"""The agent of agent.py as a graph of LangGraph: one node asks the model, one runs the tool, until there is no call."""

from __future__ import annotations

import random
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

KINDS, MOST = ("apples", "lemons", "plums"), 9


def play(problem: dict[str, Any], base_url: str, api_key: str) -> float:
    """Answer the question. Return the reward: 1 for the right number, else 0."""
    rng = random.Random(problem["seed"])
    there = {kind: rng.randint(1, MOST) for kind in KINDS}

    def count(kind: str) -> str:
        """Count fruit of a kind."""
        return str(there.get(kind, "no such kind"))

    tools = [tool(count)]
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, timeout=3600, max_retries=0)
    asks = model.bind_tools(tools)

    def ask(state: MessagesState) -> dict[str, list[AIMessage]]:
        return {"messages": [asks.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    end = graph.compile().invoke({"messages": [HumanMessage(problem["text"])]})
    return float(end["messages"][-1].content.strip() == str(there[problem["answer"]]))
