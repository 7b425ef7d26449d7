"""Run one episode of an agent, and print its conversations and what training would take from them.

    python -m extras.episode my_module.MyAgent --model-path DIR --data '{"question":"..."}'

The command starts a proxy and, without --server URL, a small server. It calls `MyAgent().run(data)`
as training does, and prints the tree of calls. Each call stands under the call that it continues,
and shows its token counts and final reward.

If one conversation appears as two trees, the agent's framework has rewritten earlier messages. The
section "Two roots" of docs/agents.md says what to do.
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
from calls.messages import with_texts
from extras import printable
from extras.failures import describe
from inference.process import Child, command
from run.inputs import fetch
from workflow import resolve_workflow


def conversation_tree(interactions: dict[str, InteractionWithTokenLogpReward]) -> Tree:
    """Draw an episode's calls as a tree. A call without a parent stands below the first call that
    it has read through a link (cache.py), if there is one."""
    links = sum(len(set(turn.reads) - {turn.parent}) for turn in interactions.values())
    root = Tree(f"{len(interactions)} turns" + f", {links} linked" * bool(links))
    branches: dict[Any, Tree] = {}
    for turn in interactions.values():
        parent = turn.parent
        known = len(parent.messages + parent.output_message_list) if parent else 0
        spoken = turn.messages[known:] + turn.output_message_list
        lines = [describe_turn(turn), *(f"{m['role']}: {text_of(m)}" for m in spoken)]
        above = parent or next(iter(turn.reads), None)
        branches[turn] = branches.get(above, root).add(escape(printable("\n".join(lines))))
    return root


def describe_turn(turn: InteractionWithTokenLogpReward) -> str:
    row = turn.to_lists()
    tokens = turn.tokens
    reward = "no reward" if turn.reward is None else f"reward {turn.reward:.2f}"
    sizes = f"{tokens.input_len} + {tokens.output_len} tokens, {sum(row['loss_mask'])} trained"
    if tokens.temperature != 1:
        sizes += f" at temperature {tokens.temperature:g}"
    return f"{reward}, {sizes}, {turn.interaction_id}"


def text_of(message: dict[str, Any]) -> str:
    functions = (call["function"] for call in with_texts(message).get("tool_calls", []))
    calls = [f"{each['name']}({each['arguments']})" for each in functions]
    return " ".join(filter(None, [message.get("content"), *calls]))


def start_server(stack: ExitStack, model: str, key: str) -> str:
    """Start a small server that `stack` ends. Return its URL."""
    words = command("inference.tiny.server", "--model-path", model)
    return start(stack, Child("server", words, variables={"POCKET_AREAL_SERVER_KEY": key}))


def start(stack: ExitStack, child: Child) -> str:
    child.start(Path(stack.enter_context(tempfile.TemporaryDirectory())))
    stack.callback(child.end)
    return child.wait_ready()


def main(argv: list[str] | None = None) -> int:
    """Return 2 for a wrong command line, 1 if a server dies or the agent fails, else 0."""
    parser = argparse.ArgumentParser(prog="python -m extras.episode")
    add = parser.add_argument
    add("agent", help="my_module.MyAgent, a class with `async def run(self, data, **extra_kwargs)`")
    add("--data", type=json.loads, help="JSON object: a line of the data; default: the first")
    add("--kwargs", type=json.loads, default={}, help="JSON object: arguments of the class")
    add("--model-path", required=True, help="folder or hub name of the model, or smollm2")
    add("--server", help="URL of a running server; default: start a small one with the model")
    add("--mode", choices=["inline", "subproc"], default="inline", help="where the agent runs")
    add("--discount", type=float, default=1.0, help="gamma in R = r + gamma * mean R(children)")
    args = parser.parse_args(argv)
    key = secrets.token_urlsafe()
    code = 2
    proxy = {"proxy_addr": "", "admin_key": key, "mode": args.mode, "discount": args.discount}
    with ExitStack() as stack:
        try:
            model = fetch(args.model_path)
            workflow: Any = resolve_workflow(args.agent, args.kwargs, proxy=proxy)
            task = sys.modules.get(args.agent.rpartition(".")[0])
            prepare = getattr(task, "prepare", dict)
            dataset = getattr(task, "dataset", None)
            sample: Any = prepare(args.data or (dataset()[0] if dataset else {}))
            code = 1  # the command line was right
            server = args.server or start_server(stack, model, key)
            words = command("proxy", "--model-path", model, "--server", server)
            keys = {"POCKET_AREAL_ADMIN_KEY": key}
            if not args.server:
                keys["POCKET_AREAL_SERVER_KEY"] = key
            workflow.proxy_addr = start(stack, Child("proxy", words, variables=keys))
            interactions = asyncio.run(workflow.arun_episode(None, sample))
        except (Exception, SystemExit) as error:  # whatever an agent raises
            print(f"error: {describe(error)}", file=sys.stderr)
            return code
    if interactions is None:
        print("the agent returned None and set no reward: training would reject this episode")
    else:
        Console(highlight=False).print(conversation_tree(interactions))
    return 0


if __name__ == "__main__":
    sys.exit(main())
