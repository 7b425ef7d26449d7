"""The client side of the inference servers, and a small server for machines without a GPU.

Read io_struct.py first (a request and its answer). Then read wire.py (JSON over HTTP), servers.py (the rules for alive
and lost servers) and weights.py (three ways to send new weights). group.py builds the process group through which mode
distributed sends weights. tiny/ is the small server. The client side imports no other room of this project.
"""
