"""An agent's call, from JSON to tokens and back.

messages.py reads the call, turn.py answers it, prompts.py makes the prompt's tokens, tools.py finds
tool calls in the output, and replies.py writes the reply. sessions.py keeps the state of an
episode. Workflows use sessions through client.py.
"""
