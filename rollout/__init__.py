"""Run episodes, and make batches of them. Read dispatcher.py first, then executor.py."""
