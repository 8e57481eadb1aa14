"""Asynchronous SGD, emulated: a server keeps the weights; each worker computes, sends its
gradients, which the server adds, and fetches the weights.

After Ahn et al. (2018), "Soft Memory Box: A Virtual Shared Memory Framework for Fast Deep Neural
Network Training in Distributed High Performance Computing", IEEE Access 6, section IV. Servers and
workers are processes of their own that do what they are told (`bench/peer.py`); all servers have
the methods of the one in `box_peer.py`, and all workers those of `worker.py`. Nothing here imports
torch but the peers of PyTorch's RPC, and those that train with PyTorch.
"""
