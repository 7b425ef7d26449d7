"""Run episodes, make batches, and evaluate. Read dispatcher.py first, then executor.py."""
