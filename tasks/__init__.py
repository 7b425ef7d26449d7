"""The tasks that the recipes train on. A task has data, an agent or workflow, and a reward. Some
tasks also have a small base model.

Read guess.py first (the demo), then maze.py (long answers) and gsm8k.py (mathematics, for a GPU).
base_model.py trains the small models of guess.py and maze.py. A task is a module. The docstring of
run/inputs.py lists the names that a task's module defines.
"""
