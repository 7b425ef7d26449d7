"""One episode of an agent, for its author: what the model was told and said, and what of it would be trained.

    python -m run.episode my_module.MyAgent --model-path DIR --data '{"question": "..."}'

It starts what an episode needs (an inference server on the model, unless --server names one that is up, and a proxy),
runs `MyAgent().run(data)` as training would, and prints the conversation tree: each call of the model under the one
that it goes on from, with its tokens and its final reward. Two roots where one conversation was meant say that the
agent's framework rewrites its history; docs/agents.md says what to do then.
"""

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from cache import InteractionWithTokenLogpReward
from run.launch import Fleet, Planned, ProcessDied, own_command
from workflow import resolve_workflow


def conversation_tree(interactions: dict[str, InteractionWithTokenLogpReward]) -> Tree:
    """An episode in export style individual, for reading: each turn under the turn that it goes on from."""
    root, branches = Tree(f"{len(interactions)} turns"), dict[Any, Tree]()
    for turn in interactions.values():
        row, known = turn.to_lists(), len(turn.parent.messages + turn.parent.output_message_list) if turn.parent else 0
        prompt_len, trained = row["turn_ids"].count(-1), sum(row["loss_mask"])
        sizes = f"{prompt_len} + {len(row['input_ids']) - prompt_len} tokens, {trained} trained"
        sizes += f" at temperature {temperature:g}" if (temperature := row["temperatures"][-1]) != 1 else ""
        lines = [f"reward {turn.reward:.2f}, {sizes}, {turn.interaction_id}"]
        lines += [f"{m['role']}: {spoken(m)}" for m in turn.messages[known:] + turn.output_message_list]
        branches[turn] = branches.get(turn.parent, root).add(escape("\n".join(lines)))
    return root


def spoken(message: dict[str, Any]) -> str:
    """A message's text and its tool calls, as one line of a program would put them."""
    functions = [call["function"] for call in message.get("tool_calls", [])]
    calls = [f"{function['name']}({json.dumps(function['arguments'])})" for function in functions]
    return " ".join(filter(None, [message["content"], *calls]))


def main(argv: list[str] | None = None) -> int:
    """Run one episode over real servers and print its tree. Returns 2 for what cannot run, 1 if a server dies."""
    parser = argparse.ArgumentParser(description="One episode of an agent: its conversation tree, rewards and tokens.")
    parser.add_argument("agent", help="my_module.MyAgent, a class with `async def run(self, data, **extra_kwargs)`")
    parser.add_argument("--data", type=json.loads, default={}, help="JSON: the sample that run() gets")
    parser.add_argument("--kwargs", type=json.loads, default={}, help="JSON: arguments of the agent's class")
    parser.add_argument("--model-path", required=True, help="Hugging Face folder")
    parser.add_argument("--server", help="URL of an inference server; default: a inference/tiny/server.py on the model")
    parser.add_argument("--mode", choices=["inline", "subproc"], default="inline", help="where the agent runs")
    parser.add_argument("--discount", type=float, default=1.0, help="by which a turn's reward reaches the one before")
    args = parser.parse_args(argv)
    options: dict[str, object] = {"--model-path": args.model_path}
    with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
        fleet = Fleet(Path(logs))
        stack.callback(fleet.stop)
        try:
            key = secrets.token_urlsafe()
            proxy = {"proxy_addr": "", "admin_key": key, "mode": args.mode, "discount": args.discount}
            workflow: Any = resolve_workflow(args.agent, args.kwargs, proxy=proxy)
            tiny = Planned("server", own_command("inference.tiny.server", options))
            options["--server"] = args.server or fleet.start(tiny).wait_ready()
            front = Planned("proxy", own_command("proxy", options), environment={"NANO_AREAL_ADMIN_KEY": key})
            workflow.proxy_addr = fleet.start(front).wait_ready()
        except (ImportError, TypeError, ValueError, ProcessDied) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1 if isinstance(error, ProcessDied) else 2
        interactions = asyncio.run(workflow.arun_episode(None, args.data))
    if interactions is None:
        print("the agent returned None and set no reward: in training this episode would be rejected")
    else:
        Console(highlight=False).print(conversation_tree(interactions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
