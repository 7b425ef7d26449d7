"""The model that learns. Start with actor.py.

layout.py and tree_attention.py turn rows into inputs of forward passes. logprobs.py computes
log-probabilities without holding all logits. proximal.py guesses the log-probabilities of pi_prox
(ppo.py). metrics.py describes a batch, and ranks.py connects the training processes.
"""
