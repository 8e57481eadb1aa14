"""Asynchronous SGD, emulated.

A server stores the weights. Each worker computes, sends its gradients, which the server adds, and
fetches the weights.

After Ahn et al. (2018), "Soft Memory Box: A Virtual Shared Memory Framework for Fast Deep Neural
Network Training in Distributed High Performance Computing", IEEE Access 6, section IV. Servers and
workers are processes that execute commands (`bench/peer.py`). All servers have the methods of
BoxServer in `box_peer.py`, and all workers the methods of `worker.py`. Only the peers of PyTorch's
RPC, and peers that train with PyTorch, import torch.
"""
