"""Configure, start, log and checkpoint a run.

Read config.py (every key), start.py (the parts of a run), inputs.py (task, data, model), log.py and
checkpoint.py (the run's files).
"""
