"""One call of an agent, from JSON to tokens and back, in the order in which it passes through.

messages.py reads it, turn.py answers it, prompts.py makes its tokens, tools.py finds calls in what
the model wrote, and replies.py writes the answer. sessions.py has what belongs to an episode, and
client.py is the workflow's way to one; extras/direct.py is another, without a process.
"""
