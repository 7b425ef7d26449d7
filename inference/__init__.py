"""This folder contains the client of the inference servers, and a small server for machines without a GPU.

Read io_struct.py first (a request and its answer). Then read wire.py (JSON over HTTP), servers.py (which servers are
alive) and weights.py (three ways to send new weights). To broadcast weights, the trainer and the servers form a process
group, which group.py builds. The folder tiny/ contains the small server for machines without a GPU. The client's
modules import nothing from the project's other folders.
"""
