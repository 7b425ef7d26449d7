"""An inference server that speaks SGLang's protocol on a machine without a GPU.

Read server.py first (the routes and the thread that owns the model), then scheduler.py (which sequences the next step
computes), model.py (one step of a batch over a cache of keys and values) and protocol.py (the bodies of requests and
replies). From the clients' side, this room imports only the process group of a weight update (inference/group.py).
"""
