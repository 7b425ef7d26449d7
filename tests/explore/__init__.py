"""Explore every order in which the events of a small system can happen, and check each state that
the system can reach.

    `python -m tests.explore --large` explores all state machines within large bounds, and counts
    the states. `python -m tests.explore --walk` makes random walks within bounds that are too large
    for a complete search.

Read search.py first: it explains state machines and the search. dispatcher.py, turns.py and
updates.py have one state machine each, which runs the project's real classes, not models of them.
docs/results.md says what they check.
"""
