"""The model that learns: actor.py, and how its rows go through it.

layout.py and tree_attention.py turn rows into forward passes, logprobs.py computes
log-probabilities without the logits of the whole batch, proximal.py guesses pi_prox, ranks.py
connects processes.
"""
