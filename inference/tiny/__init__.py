"""A small inference server. Read server.py, sampling.py, scheduler.py, then model.py."""
