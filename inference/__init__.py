"""The client side of the inference servers, and a small server for machines without a GPU.

Read io_struct.py first (a request and its answer). Then read wire.py (JSON over HTTP), servers.py (which servers are
alive, and which one takes a conversation) and weights.py (three ways to send new weights). group.py builds the process
group of one of these ways. tiny/ is the small server. The client side imports no other room of this project.
"""
