"""An agent with LangGraph (https://langchain-ai.github.io/langgraph)."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


class Agent:
    async def run(self, data, **extra_kwargs):
        model = ChatOpenAI(
            model="default",
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            max_retries=0,
        ).bind_tools([add, multiply])

        async def think(state: MessagesState):
            return {"messages": [await model.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("think", think)
        graph.add_node("tools", ToolNode([add, multiply]))
        graph.add_edge(START, "think")
        graph.add_conditional_edges(
            "think", tools_condition
        )  # the next node is "tools" if the model calls a tool
        graph.add_edge("tools", "think")
        question = {"messages": [("user", data["question"])]}
        final = await graph.compile().ainvoke(question, {"recursion_limit": 10})
        return float(final["messages"][-1].content.split()[-1:] == [data["answer"]])
