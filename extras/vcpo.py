"""VCPO (arXiv 2602.17616): take a smaller step if few tokens carry most of the weight.

    callbacks: [extras.vcpo.VCPO]

Let ESS = (sum w)^2 / sum w^2, over M tokens with the weights w (ppo.py). Their gradient is as noisy
as an unweighted gradient over ESS tokens. So every optimizer step uses lr * (ESS / M)^power. If the
gradient were multiplied instead of lr, nothing would change, because AdamW normalises it.
"""

from typing import Any


class VCPO:
    """A subclass can set another power; the paper uses 0.5 for AdamW."""

    power = 0.5

    def __init__(self, config: Any) -> None:
        pass

    def on_start(self, run: Any) -> None:
        def scale(optimizer: Any, *_: Any) -> None:
            stats = run.actor.minibatch  # the metrics of the mini-batch
            square = stats["behave_weight_square"]
            share = stats["behave_weight_mean"] ** 2 / square if square else 0.0  # ESS / M
            for group in optimizer.param_groups:
                group["lr"] *= share**self.power

        run.actor.optimizer.register_step_pre_hook(scale)
