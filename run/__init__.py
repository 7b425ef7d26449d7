"""Configure, start, log, checkpoint and end a run.

Read config.py (every key), start.py (the parts of a run), launch.py (its processes), inputs.py
(task, data, model), and log.py and checkpoint.py (its files).
"""
