"""The tasks of the recipes: their data, their agents and rewards, and the small models that they start from.

Read guess.py first (the demo), then maze.py (long answers) and gsm8k.py (mathematics, for a GPU). base_model.py
trains the small models of guess.py and maze.py. A task is a module, and run/inputs.py says what a task defines.
"""
