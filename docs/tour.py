"""The tour follows one prompt group of the demo through a real run, and collects the numbers for docs/lifecycle.md.

    make tour        runs docs/lifecycle.py, which prints the page docs/lifecycle.md with the tour's numbers

The tour is a run of train.py with eta = 1, one group in a batch, four games in a group and two steps. The tour shows
the second group, on which step 2 trains.

In an ordinary run, a weight update may arrive at any moment. In the tour, the weight update always arrives after the
first turns of the second group, because PacedAgent delays two groups. The games of the first group do not end until the
first turns of the second group have finished. The later turns of the second group wait for the start of the third
group, and the third group starts after the weight update. All seeds are fixed, so every tour on one machine shows the
same numbers. On another machine the base model may be slightly different, and then the numbers also differ.
"""

import asyncio
import tempfile
from typing import Any

from safetensors.torch import load_file

from ppo import ppo_actor_loss_fn
from run.command import open_run
from run.load import load
from train import TrainingLoop
from workflow import import_string, workflow_context

KEYS = """experiment_name=tour max_steps=2 train_dataset.batch_size=1 gconfig.n_samples=4 gconfig.seed=1 actor.kl_ctl=0
    actor.optimizer.warmup_steps=0 rollout.openai.turn_discount=0.5 doctor=off"""


class PacedAgent:
    """An agent that runs the demo's agent with delays. The weight update always arrives after the first turns of the
    second group."""

    def __init__(self, agent: Any) -> None:
        self.agent, self.arrived, self.updated = agent, asyncio.Semaphore(0), asyncio.Event()

    async def run(self, data: dict, http_client: Any, **kwargs: Any) -> float:
        """Play a game and return its reward."""

        async def before(request: Any) -> None:
            await self.pace(is_later=b"assistant" in request.content, is_over=False)

        http_client.event_hooks = {"request": [before]}
        reward = await self.agent.run(data, http_client=http_client, **kwargs)
        await self.pace(is_later=True, is_over=True)
        return reward

    async def pace(self, is_later: bool, is_over: bool) -> None:
        """Delay a request, or the end of a game if `is_over` is true. `is_later` is true if the request belongs to a
        later turn than the first turn of its game."""
        group = workflow_context.get().task_id
        if group == 0 and is_over:
            await self.arrived.acquire()
        elif group == 1 and is_later:
            self.arrived.release()
            await self.updated.wait()
        elif group == 2:
            self.updated.set()


def read_gate(rollout: Any) -> dict[str, int]:
    """Return the state of the staleness gate: version, places, started groups, and capacity."""
    gate, stat = rollout.executor.staleness_manager, rollout.executor.stats
    version, started = rollout.get_version(), stat.accepted + stat.running
    places = (gate.max_staleness + version + 1) * gate.consumer_batch_size
    return {
        "version": version,
        "places": places,
        "started": started,
        "capacity": gate.get_capacity(),
    }


def take_tour() -> dict[str, Any]:
    """Train two steps. Return the states of the gate, the tensors of the second group, and the tensors of the longest
    game in the second group."""
    with tempfile.TemporaryDirectory() as folder:
        config = load([*KEYS.split(), f"fileroot={folder}"])
        agent = PacedAgent(import_string(f"{config.task}.WORKFLOW")())
        with open_run(config, agent) as run:
            trainer = TrainingLoop(run)
            gates = [read_gate(trainer.rollout)]
            for _ in range(2):
                trainer.rollout.executor.submit({"secret": 5}, agent, group_size=4)
            gates.append(read_gate(trainer.rollout))
            for step in (1, 2):
                trainer.train_step(step)
                gates.append(read_gate(trainer.rollout))
            group = load_file(
                config.run_dir / "tokens" / "00002.safetensors"
            )  # tensors of shape (4, T) or (4,)
    turns = group["turn_ids"]
    # From the games with the most turns, take a game in which the secret was found.
    longest = int((turns.amax(1) + group["rewards"]).argmax())
    game = {
        key: x[longest][turns[longest] >= 0] for key, x in group.items() if x.shape == turns.shape
    }  # (n,)
    policies = game["theta_logp"], game["prox_logp"], game["logprobs"]
    loss, _ = ppo_actor_loss_fn(*policies, game["advantages"], game["loss_mask"], config.actor)
    words = run.inputs.tokenizer.convert_ids_to_tokens(range(len(run.inputs.tokenizer)))
    tour = {"gates": gates, "group": group, "longest": longest, "game": game, "loss": float(loss)}
    return tour | {"words": words, "model_path": config.model_path}
