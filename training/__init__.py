"""The model that learns. Start with actor.py.

layout.py and tree_attention.py turn rows into the inputs of forward passes, logprobs.py computes
log-probabilities without holding all logits, proximal.py guesses pi_prox, and ranks.py connects the
processes that train.
"""
