"""The client of the inference servers, and a small server for CPU and CUDA (tiny/).

Read io_struct.py first: it defines a request and its answer. servers.py chooses and checks servers.
weights.py sends new weights to the servers. serve.py runs a web application, process.py starts and
ends processes, and fields.py checks JSON.
"""
