"""Which episodes run, and what becomes a batch. Read dispatcher.py first, then executor.py."""
