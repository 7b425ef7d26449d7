"""This folder contains the client of the inference servers, and a small server for machines without a GPU.

Read io_struct.py first (a request and its answer). Then read wire.py (JSON over HTTP), servers.py (which servers are
alive) and weights.py (three ways to send new weights). In one of the three ways, the trainer broadcasts the weights in
a process group, which group.py builds. The folder tiny/ holds the small server. The client's modules import nothing
from the project's other folders.
"""
