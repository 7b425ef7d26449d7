"""The client of the inference servers, and a small server for CPU and CUDA (tiny/).

Read io_struct.py first: it defines a request and its answer. Then read servers.py (chooses and
checks servers), weights.py (sends them new weights) and wire.py (makes the connections). serve.py
runs a web application, fields.py checks JSON from agents and models, and with_parent.py ends SGLang
when the run ends.
"""
