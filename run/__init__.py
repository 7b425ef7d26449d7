"""A run's beginning, middle and end; none of the ideas.

Read config.py first (every key and its meaning), then start.py and launch.py (what a run starts, and how that ends).
recover.py brings a killed run back; logger.py, summary.py and evaluate.py say what happened. serve.py, fields.py and
leash.py are what the server processes share. This room may import every other room; only config.py, fields.py and
serve.py are imported by them.
"""
