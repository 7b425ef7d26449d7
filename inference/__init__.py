"""The client of the inference servers, and a small server for CPU and CUDA (tiny/).

Read io_struct.py first (a request and its answer), then servers.py (choosing and checking servers),
weights.py (two ways to send new weights) and wire.py (connections). serve.py runs a web
application, fields.py checks JSON from agents and models, and with_parent.py ends SGLang when the
run ends.
"""
