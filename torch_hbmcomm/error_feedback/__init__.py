"""Error feedback: the part that layer_drop_hook and low_rank_hook share.

A step sends a part of a rank's gradients. The rank adds the other part to its residuals, and later
steps send it from there. Read state.py first, which handles a bucket from its gradients to its
averages. encoder.py has the interface of an encoder, which chooses the part that is sent.
"""
