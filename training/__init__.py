"""The model that learns.

Read actor.py first: it takes a batch through the model and the optimizer. layout.py says how rows become one forward
pass, tree_attention.py computes shared prefixes once, logprobs.py reads log-probabilities without the logits of a whole
batch. advantages.py and proximal.py hold the variants of the objective in ppo.py, ranks.py the processes that train
together. This room knows nothing of rollouts and calls.
"""
