"""Configure, start, log, checkpoint and end a run.

Read config.py (every key), start.py (what a run is made of), launch.py (its processes), inputs.py
(task, data, model), log.py and checkpoint.py (what it writes), evaluate.py.
"""
