"""This folder contains an inference server that uses SGLang's protocol and runs on a machine without a GPU.

Read server.py first (the routes and the thread that owns the model). Then read scheduler.py (the choice of the
sequences for the next step), model.py (one step of a batch with a KV cache), fast.py (the forward pass of Llama, Qwen2
and Qwen3) and protocol.py (the bodies of requests and replies). The server shares one module with its clients:
inference/group.py, which builds the process group of a weight update.
"""
