"""The tasks that the recipes train on.

Read guess.py first (the demo), then calculator.py (a tool, which the pretrained model of smollm2.py
learns to call), maze.py (long answers) and gsm8k.py (mathematics, for a GPU). base_model.py trains
the small models of guess.py and maze.py. run/inputs.py lists the names that a task's module
defines.
"""
