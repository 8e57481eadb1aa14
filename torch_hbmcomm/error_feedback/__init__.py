"""Error feedback: the part that layer_drop_hook and low_rank_hook share.

A rank keeps the part of its gradients that a step does not send as residuals, and later steps send
it. Read state.py first, which handles a bucket from its gradients to its averages. encoder.py has
the interface of an encoder, which chooses the part that is sent.
"""
