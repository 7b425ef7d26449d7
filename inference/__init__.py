"""The servers that generate, and what they are told.

Read io_struct.py (a request and its answer), wire.py (JSON over HTTP), servers.py (which server
gets a request) and weights.py (new weights). serve.py runs a server process, and tiny/ is a small
real one. Nothing here imports the other rooms.
"""
