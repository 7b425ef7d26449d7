"""A small inference server. Read server.py first, then sampling.py, scheduler.py and model.py."""
