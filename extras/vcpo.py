"""VCPO (arXiv 2602.17616): a smaller step where few tokens carry all of the weight.

    callbacks: [extras.vcpo.VCPO]

The gradient of M tokens with the weights w is as noisy as that of ESS tokens with equal weights,
ESS = (sum w)^2 / sum w^2. So lr <- lr * (ESS / M)^power, in every optimizer step. The rate is
scaled and not the gradient, because AdamW normalises gradients.
"""

from typing import Any


class VCPO:
    """A callback. A subclass may set another power; 0.5 is the paper's for AdamW."""

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
