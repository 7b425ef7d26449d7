"""This folder contains the client of the inference servers, and a small server for machines without a GPU.

Read io_struct.py first (a request and its answer). Then read wire.py (JSON over HTTP), servers.py (which servers are
alive) and weights.py (three ways to send new weights). One way to send weights broadcasts them in a process group,
which group.py builds. tiny/ is the small server. The client imports no other folder of this project.
"""
