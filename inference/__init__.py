"""This folder contains the client of the inference servers, and a small server for machines without a GPU.

Read io_struct.py first (a request and its answer). Then read wire.py (JSON over HTTP), servers.py (which servers are
alive) and weights.py (three ways to send new weights). group.py builds the process group for one of these ways, which
broadcasts the weights. tiny/ is the small server. The client imports no other folder of this project.
"""
