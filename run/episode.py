"""Run one episode of an agent, and print the conversation and the number of tokens that would be trained.

    python -m run.episode my_module.MyAgent --model-path DIR --data '{"question":"..."}'

The command starts a proxy and an inference server with the model. With --server URL the command starts only the proxy,
and uses the inference server at this URL. The command runs `MyAgent().run(data)`, as training does, and prints the
conversation tree. Each call is printed below its parent call, with its number of tokens and its final reward.

If the command prints one conversation as two trees, the agent's framework has rewritten earlier messages. The entry
"Two roots" in docs/agents.md names a remedy for two trees of one conversation.
"""

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from cache import InteractionWithTokenLogpReward
from run.failures import describe
from run.launch import Fleet, Planned, own_command
from workflow import resolve_workflow


def conversation_tree(interactions: dict[str, InteractionWithTokenLogpReward]) -> Tree:
    """Draw an episode's interactions as a tree. The interactions must be exported in style "individual"."""
    root = Tree(f"{len(interactions)} turns")
    branches: dict[Any, Tree] = {}
    for turn in interactions.values():
        known = (
            turn.parent.messages + turn.parent.output_message_list if turn.parent else []
        )  # already in the tree
        lines = [describe_turn(turn)]
        lines += [
            f"{m['role']}: {spoken(m)}"
            for m in turn.messages[len(known) :] + turn.output_message_list
        ]
        branches[turn] = branches.get(turn.parent, root).add(escape("\n".join(lines)))
    return root


def describe_turn(turn: InteractionWithTokenLogpReward) -> str:
    """Return one line with a turn's reward, its token counts and its id."""
    row = turn.to_lists()
    prompt_len, trained = row["turn_ids"].count(-1), sum(row["loss_mask"])
    sizes = f"{prompt_len} + {len(row['input_ids']) - prompt_len} tokens, {trained} trained"
    reward = "no reward" if turn.reward is None else f"reward {turn.reward:.2f}"
    temperature = row["temperatures"][-1]
    if temperature != 1:
        sizes += f" at temperature {temperature:g}"
    return f"{reward}, {sizes}, {turn.interaction_id}"


def spoken(message: dict[str, Any]) -> str:
    """Return a message's text, followed by its tool calls in the form name(arguments)."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    calls = [f"{function['name']}({json.dumps(function['arguments'])})" for function in functions]
    return " ".join(filter(None, [message["content"], *calls]))


def main(argv: list[str] | None = None) -> int:
    """Run one episode and print the conversation tree.

    Return the exit code: 2 for a wrong command line, 1 if a server dies or the agent fails, else 0.
    """
    parser = argparse.ArgumentParser(
        description="Run one episode of an agent and print its conversation tree."
    )
    add = parser.add_argument
    add("agent", help="my_module.MyAgent, a class with `async def run(self, data, **extra_kwargs)`")
    add(
        "--data",
        type=json.loads,
        default={},
        help="JSON object that is passed to run() as the sample",
    )
    add(
        "--kwargs",
        type=json.loads,
        default={},
        help="JSON object with keyword arguments of the agent's class",
    )
    add("--model-path", required=True, help="Hugging Face folder of the model")
    add(
        "--server",
        help="URL of a running inference server; default: start inference.tiny.server with the model",
    )
    add(
        "--mode",
        choices=["inline", "subproc"],
        default="inline",
        help="subproc: run the agent in its own process",
    )
    add(
        "--discount",
        type=float,
        default=1.0,
        help="share of a turn's final reward that its parent turn receives",
    )
    args = parser.parse_args(argv)
    options: dict[str, object] = {"--model-path": args.model_path}
    with tempfile.TemporaryDirectory() as logs, closing(Fleet(Path(logs))) as fleet:
        # An error in the command's arguments gives exit code 2, and any later error gives exit code 1.
        code = 2
        try:
            key = secrets.token_urlsafe()
            proxy = {
                "proxy_addr": "",
                "admin_key": key,
                "mode": args.mode,
                "discount": args.discount,
            }
            workflow: Any = resolve_workflow(args.agent, args.kwargs, proxy=proxy)
            code = 1
            server = Planned(
                "server",
                own_command("inference.tiny.server", options | {"--api-key": "-"}),
                keys=(key,),
            )
            options["--server"] = args.server or fleet.start(server).wait_ready()
            options |= {"--admin-key": "-", "--server-key": None if args.server else "-"}
            front = Planned("proxy", own_command("proxy", options), keys=(key, key))
            workflow.proxy_addr = fleet.start(front).wait_ready()
            interactions = asyncio.run(workflow.arun_episode(None, args.data))
        except Exception as error:  # an agent may raise any exception
            print(f"error: {describe(error)}", file=sys.stderr)
            return code
    if interactions is None:
        print(
            "the agent returned None and set no reward: in training this episode would be rejected"
        )
    else:
        Console(highlight=False).print(conversation_tree(interactions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
