"""Run episodes, make batches of them, and evaluate. Read dispatcher.py first, then executor.py."""
