"""The tasks of the recipes: their data, their agents and rewards, and the small models they begin with.

Read guess.py first (the demo), then maze.py (long answers) and gsm8k.py (mathematics, for a GPU). base_model.py trains
the small models that the first two begin with. A task is a module; run/inputs.py says what it defines.
"""
