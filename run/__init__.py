"""Configure, start, log, checkpoint and end a run.

Read config.py (every key), start.py (the parts of a run), launch.py (its processes), inputs.py
(task, data, model), log.py and checkpoint.py (its files), and evaluate.py.
"""

import sys

# These moved to extras/. For one version the old names say so.
for _name in ("chat", "episode", "doctor", "report"):
    if sys.orig_argv[1:3] == ["-m", f"run.{_name}"]:
        sys.exit(f"run.{_name} has moved: python -m extras.{_name}")
