"""The modules in calls/ convert the JSON of an agent's request into tokens, and the model's tokens into a JSON reply.

Read the modules in the order in which a request passes through them. The module messages.py reads a request in one of
three protocols. The module turn.py answers one call, from the entry in the conversation tree to the last byte of the
reply. The module prompts.py converts messages to prompt tokens, and output tokens to text. The module tools.py splits a
model's text into reasoning, text and tool calls. The module replies.py writes an answer in one of three protocols.

The module sessions.py keeps the proxy's sessions. The module side_conversations.py finds calls that a client makes for
its own purposes, such as a request for a title. The module client.py connects an episode to the proxy. Modules in
calls/ may import the conversation tree (cache.py) and the dataclasses of a request (inference/io_struct.py), but no
module from rollout/ or training/.
"""
