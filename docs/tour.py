"""Follow one prompt group of the demo through a real run, for docs/lifecycle.md (make tour).

The run has eta = 1, one group in a batch, four games in a group and two steps. The tour shows the
second group, on which step 2 trains.

In an ordinary run a weight update comes at any moment. Here the first update always comes between
the first and later turns of the second group, because PacedAgent holds groups back. The first
group, on which step 1 trains, ends only after the second group's first turns. The second group's
later turns wait for the third group, which starts after the update. With fixed seeds, all tours on
one machine show the same numbers.
"""

import asyncio
import tempfile
from itertools import count
from typing import Any

from safetensors.torch import load_file

from inference.fields import import_name
from ppo import ppo_actor_loss_fn
from run.config import load
from train import PPOTrainer
from workflow import workflow_context

KEYS = """experiment_name=tour max_steps=2 train_dataset.batch_size=1 gconfig.n_samples=4
    actor.kl_ctl=0 actor.optimizer.warmup_steps=0 rollout.openai.turn_discount=0.5 callbacks=[]"""


class PacedAgent:
    """Delays the demo's agent, so that the update comes after the second group's first turns."""

    def __init__(self, agent: Any) -> None:
        self.agent, self.arrived, self.updated = agent, asyncio.Semaphore(0), asyncio.Event()

    async def run(self, data: dict, http_client: Any, **kwargs: Any) -> float:
        async def before(request: Any) -> None:
            await self.pace(is_later=b"assistant" in request.content, is_over=False)

        http_client.event_hooks = {"request": [before]}
        reward = await self.agent.run(data, http_client=http_client, **kwargs)
        await self.pace(is_later=True, is_over=True)
        return reward

    async def pace(self, is_later: bool, is_over: bool) -> None:
        group = workflow_context.get().task_id
        if group == 0 and is_over:
            await self.arrived.acquire()
        elif group == 1 and is_later:
            self.arrived.release()
            await self.updated.wait()
        elif group == 2:
            self.updated.set()


def read_gate(executor: Any) -> dict[str, int]:
    gate, stat = executor.gate, executor.stats
    version, started = gate.version_provider.get_version(), stat.accepted + stat.running
    places = (gate.max_staleness + version + 1) * gate.consumer_batch_size
    capacity = gate.get_capacity()
    return {"version": version, "places": places, "started": started, "capacity": capacity}


def train_two_steps(*words: str) -> dict[str, Any]:
    """Return the states of the gate, the second group's games as tensors (4, T) or (4,), the
    configuration and the tokenizer. `words` are further keys, such as "seed=2"."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = PPOTrainer(load([*KEYS.split(), *words, f"fileroot={folder}"])[0])
        config = trainer.config
        agent = PacedAgent(import_name(f"{config.task}.WORKFLOW")())
        with trainer.run as run:
            trainer.start(agent, None)
            gates = [read_gate(run.executor)]
            for _ in range(2):
                run.executor.submit({"secret": 5}, agent, group_size=4)
            gates.append(read_gate(run.executor))
            for step in (1, 2):
                trainer.train_step(step)
                gates.append(read_gate(run.executor))
            tokenizer = run.inputs.tokenizer
            group = load_file(config.run_dir / "tokens" / "00002.safetensors")
    return {"gates": gates, "group": group, "config": config, "tokenizer": tokenizer}


def take_tour() -> dict[str, Any]:
    """Train with one seed after another, until a game of two or more turns finds the secret. Return
    the tour with the longest such game."""
    tour = train_two_steps()
    for seed in count(2):
        group, config, tokenizer = tour["group"], tour["config"], tour.pop("tokenizer")
        turns = group["turn_ids"]
        lengths = turns.amax(1) * group["rewards"]  # 0 for a lost game, and for a game of one turn
        if lengths.max() > 0:
            break
        tour = train_two_steps(f"seed={seed}", f"model_path={config.model_path}")
    longest = int(lengths.argmax())
    game = {
        key: x[longest][turns[longest] >= 0] for key, x in group.items() if x.shape == turns.shape
    }  # (n,)
    policies = game["theta_logp"], game["prox_logp"], game["logprobs"]
    actor = config.actor
    clip = {name: getattr(actor, name) for name in ("eps_clip", "eps_clip_higher", "c_clip")}
    loss, _ = ppo_actor_loss_fn(*policies, game["advantages"], game["loss_mask"], **clip)
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    found = {"longest": longest, "game": game, "loss": float(loss), "words": words}
    return tour | found | {"model_path": config.model_path}
