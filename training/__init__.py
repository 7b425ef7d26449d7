"""This folder contains the modules that train the model.

Read actor.py first. The actor runs a batch through the model and the optimizer. `layout.py` turns rows into the input
of a forward pass. `tree_attention.py` computes shared prefixes only once. `logprobs.py` computes log-probabilities
without the logits of the whole batch. `optimizer.py` holds the optimizer. `ppo.py` (one folder up) holds the objective.
`advantages.py`, `corrections.py` and `proximal.py` hold variants of the objective. `config.py` holds the keys that
choose a variant. `ranks.py` connects the processes that train together. Modules of this folder import nothing from
rollout/ or calls/.
"""
