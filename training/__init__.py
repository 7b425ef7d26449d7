"""The model that learns. Start with actor.py.

layout.py and tree_attention.py turn rows into forward passes, logprobs.py computes
log-probabilities without logits of the whole batch, proximal.py guesses pi_prox, and ranks.py
connects processes.
"""
