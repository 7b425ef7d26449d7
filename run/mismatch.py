"""Compare the log-probabilities of the inference servers with the log-probabilities of the trainer.

A server and the trainer should have the same weights. The server and the trainer are different programs, so their
log-probabilities differ by rounding (about 1e-6 in float32, 0.05 in bfloat16). A difference above the rounding error
means that the server and the trainer use different weights or different masks. If the model weights or the masks
differ, the probability ratios in the loss are wrong.

Two checks look for log-probabilities that differ by more than the rounding error. The first check, `logp_mismatch`,
compares the server's log-probabilities with the trainer's log-probabilities. The first check uses only the tokens that
were sampled at the current version, and some batches have no token of this version. The second check is the canary, two
short sequences of tokens. After each weight update, the trainer and every server compute the scores of the canary,
which are the log-probabilities of its tokens. A request to score the canary waits in the queue of a busy server behind
all earlier requests. The trainer continues without waiting for the servers' scores, and reads the scores before the
next update.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from engine import RemoteInfEngine
from inference.wire import EngineError
from run.logger import Trace
from run.start import NoRollout
from training.actor import FSDPPPOActor

CANARY_ROWS, CANARY_TOKENS = 2, 16  # with two rows, a server that swaps rows is noticed
# If an update changes one of the trainer's scores by more than CANARY_MOVE nats, every server's scores must change.
CANARY_MOVE = 1e-4


def logp_mismatch(batch: dict[str, Tensor], version: int) -> float:
    """Return max |log p_server - log p_trainer| in nats, over the tokens that were sampled at the trainer's version.

    The result is 0 if no token was sampled at the trainer's version, or if the batch lacks `prox_logp` (the trainer's
    log-probabilities).
    """
    current = batch["loss_mask"].bool() & (batch["versions"] == version)  # (B, T)
    differences = (batch["logprobs"] - batch.get("prox_logp", batch["logprobs"]))[current]
    return torch.cat([torch.zeros(1), differences]).abs().nan_to_num(torch.inf).max().item()


class Canary:
    """Two short sequences that every server and the trainer score after each weight update.

    A server lacks the new weights if its scores differ from the trainer's scores by more than rounding, or if its
    scores have the same bits before and after the update. An unchanged score reveals a missed update even if the update
    changes the trainer's score by less than the rounding error of bfloat16.
    """

    def __init__(
        self, actor: FSDPPPOActor, rollout: RemoteInfEngine | NoRollout, trace: Trace
    ) -> None:
        self.actor, self.rollout, self.trace = actor, rollout, trace
        self.threads = ThreadPoolExecutor(
            CANARY_ROWS, "canary"
        )  # one thread for each row of the canary
        self.rows: dict[
            str, Tensor
        ] = {}  # the canary: the first tokens of the first rows of the run's first batch
        self.trainer = torch.empty(0)  # the trainer's scores after the last update, (L,)
        self.asked: list[
            Future[list[list[float]]]
        ] = []  # for each row, the request for the servers' scores.
        # The scores at the last call of `finish`, (1 + servers, L): row 0 is the trainer's, and row k is server k's.
        self.before = torch.empty(0)

    def start(self, batch: dict[str, Tensor]) -> None:
        """Compute the trainer's scores, and ask the servers for their scores in background threads. All ranks call this
        method."""
        if not self.rows:
            first = {key: x[:CANARY_ROWS] for key, x in batch.items()}
            self.rows = {
                key: x[:, :CANARY_TOKENS] if x.dim() > 1 else x for key, x in first.items()
            }
            self.rows["temperatures"] = torch.ones_like(self.rows["temperatures"])
        mask = self.rows["loss_mask"] = self.rows[
            "attention_mask"
        ]  # every token of the canary gets a score
        with self.trace.span("canary"):
            self.trainer = self.actor.compute_logp(self.rows)[mask]
        if isinstance(self.rollout, RemoteInfEngine):
            rows = [ids[m].tolist() for ids, m in zip(self.rows["input_ids"], mask, strict=True)]
            self.asked = [self.threads.submit(self.rollout.score, ids) for ids in rows]

    def finish(self, **known: float) -> dict[str, float]:
        """Wait for the servers' scores, and return the metrics of the canary.

        Each metric in the result is the maximum of the new value and the value in `known`. The result is {} if a server
        does not answer, or if `start` was not called since the last call of `finish`.
        """
        asked, self.asked = self.asked, []
        if not asked:
            return {}
        try:
            with self.trace.span("canary"):
                rows = [answer.result() for answer in asked]
        except EngineError:
            return {}
        servers = [
            torch.cat([torch.tensor(x) for x in of_server]) for of_server in zip(*rows)
        ]  # one server: (L,)
        before, self.before = self.before, torch.stack([self.trainer, *servers])
        return {
            name: max(x, known.get(name, x))
            for name, x in compare_scores(before, self.before).items()
        }


def compare_scores(before: Tensor, now: Tensor) -> dict[str, float]:
    """Compare the scores before and after a weight update, two tensors (1 + servers, L). Return canary_mismatch, in
    nats, and canary_unchanged, the number of servers whose scores did not change although the trainer's scores did."""
    mismatch = (now[1:] - now[0]).abs().nan_to_num(torch.inf).max().item()
    unchanged = 0
    if before.shape == now.shape and (now[0] - before[0]).abs().max() > CANARY_MOVE:
        unchanged = int((now[1:] == before[1:]).all(1).sum())
    return {"canary_mismatch": mismatch, "canary_unchanged": unchanged}
