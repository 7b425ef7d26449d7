"""One call of an agent, from its JSON to tokens and back.

Read the modules in the order of a request: messages.py (three protocols become one request), prompts.py (messages
become tokens, exactly once), turn.py (one call from its first byte to its last), tools.py (what the model's text
contains), replies.py (one answer becomes three protocols). sessions.py holds the episodes that are open at the proxy,
client.py is the other end of an episode. This room may import the conversation tree and the records of a request; it
knows nothing of rollouts and training.
"""
