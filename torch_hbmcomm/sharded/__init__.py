"""Gradient compression for fully_shard (FSDP2): between the nodes, each of which has all shards.

replicas.py has replicate_shards() and the states that it makes. shards.py finds the shards of a
model, and refuses models whose shards cannot be averaged.
"""

from torch_hbmcomm.sharded.replicas import replicate_shards

__all__ = ["replicate_shards"]
