"""An agent's call, from JSON to tokens and back.

messages.py reads the call, turn.py answers it, prompts.py makes its tokens, tools.py finds tool
calls in the model's output, and replies.py writes the answer. sessions.py keeps the state of an
episode. A workflow reaches a session by client.py, or without a process by extras/direct.py.
"""
