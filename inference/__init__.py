"""The inference servers, as their clients see them.

Read io_struct.py first (a request and its answer), then wire.py (JSON over HTTP), servers.py (which server takes a
conversation, and which servers live) and weights.py (three ways to send new weights; group.py is the process group of
one of them). tiny/ is an inference server for machines without a GPU. This room knows nothing of the other rooms.
"""
