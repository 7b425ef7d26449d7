"""Configure, start, log, checkpoint and end a run.

Read config.py (every key), start.py (what a run is made of), launch.py (its processes), inputs.py
(task, data, model), log.py and checkpoint.py (what it writes), evaluate.py.
"""

import sys

# Commands that have moved to extras/: for one version, their old names say so.
for _name in ("chat", "episode", "doctor", "report"):
    if sys.orig_argv[1:3] == ["-m", f"run.{_name}"]:
        sys.exit(f"run.{_name} has moved: python -m extras.{_name}")
