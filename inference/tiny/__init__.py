"""A small inference server. Read server.py, scheduler.py, model.py, then sampling.py."""
