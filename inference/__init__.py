"""The client of the inference servers, and in tiny/ a small server for CPU and CUDA.

Read io_struct.py first (a request and its answer), then servers.py (choosing and checking servers),
weights.py (two ways to send new weights) and wire.py (connections). serve.py runs a server process,
fields.py reads its requests, and with_parent.py ends SGLang with the run.
"""
