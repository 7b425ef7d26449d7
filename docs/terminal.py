"""Draw the terminal of a run: docs/terminal.svg with 80 columns, and docs/terminal-wide.svg with 160 columns.

    python docs/terminal.py RUN

RUN is the folder of a run. The drawings show the live table of RUN after two thirds of its steps. The clock and the
last line of the drawings show invented values, because a run's files do not record the true values.
"""

import io
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))


def main() -> None:
    from omegaconf import OmegaConf
    from rich.console import Console

    from run.logger import Logger
    from staleness import RolloutStat

    folder = Path(sys.argv[1])
    config: Any = OmegaConf.load(folder / "config.yaml")
    config.run_dir, config.logger.live = folder, False
    logger = Logger(config, SimpleNamespace(stats=RolloutStat(), ended=0))
    logger.history = logger.history[: 2 * len(logger.history) // 3]
    done, batch = len(logger.history), config.train_dataset.batch_size
    logger.executor.stats.accepted = done * batch + batch // 2
    logger.executor.ended = logger.executor.stats.accepted * config.gconfig.n_samples
    trace: Any = SimpleNamespace(phase=("rollout_wait", time.monotonic() - 3))
    logger.trace = trace
    for name, width in (("terminal", 80), ("terminal-wide", 160)):
        os.environ["COLUMNS"] = str(
            width
        )  # the live table reads its width from the variable COLUMNS
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(f"{logger.history[-1]['wall_s'] + 12:.0f} s since start", highlight=False)
        console.print(logger._screen())
        console.save_svg(str(DOCS / f"{name}.svg"), title="python train.py")


if __name__ == "__main__":
    main()
