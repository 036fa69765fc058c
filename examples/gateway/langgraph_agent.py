"""The quickstart's task for a LangGraph agent that compacts its context.

A graph of two nodes, written as for any server: the model, and the database. Of the looks at the
database, only the last one stays in the context.
"""

from __future__ import annotations

import asyncio
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

from examples.gateway.sql_agent import DATABASES, MAX_TURNS
from skyrl_fast.extras.text2sql.env import Text2SqlEnv

QUESTION = 2  # messages: the system's, the user's
STOP = ["</sql>", "</solution>"]


class State(MessagesState):
    """The conversation, and the reward at its end."""

    reward: float | None


async def solve(task: Any) -> dict[str, float]:
    """Return the reward of one question.

    Args:
        task: an `AgentTask`.
    """
    tool = Text2SqlEnv(DATABASES, {**task.row, "max_turns": MAX_TURNS})
    model = ChatOpenAI(
        model=task.model,
        base_url=task.base_url,
        api_key=task.api_key,
        stop_sequences=STOP,
        extra_body={"include_stop_str_in_output": True},
    )

    async def ask(state: State) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def look(state: State) -> dict[str, Any]:
        result = await asyncio.to_thread(tool.step, state["messages"][-1].content)
        if result["done"]:
            return {"reward": result["reward"]}
        old = state["messages"][QUESTION:-1]  # before the last answer
        seen = [HumanMessage(message["content"]) for message in result["observations"]]
        return {"messages": [*(RemoveMessage(id=message.id) for message in old), *seen]}

    graph = StateGraph(State)
    graph.add_node("ask", ask)
    graph.add_node("look", look)
    graph.add_edge(START, "ask")
    graph.add_edge("ask", "look")
    graph.add_conditional_edges("look", lambda s: "ask" if s.get("reward") is None else END)
    final = await graph.compile().ainvoke({"messages": task.row["prompt"], "reward": None})
    answers = sum(isinstance(message, AIMessage) for message in final["messages"])
    return {"reward": final["reward"], "answers_kept": float(answers)}
