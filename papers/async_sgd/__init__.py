"""Asynchronous SGD, emulated.

A server stores the weights. Each worker computes and sends its gradients, the server adds them to
the weights, and the worker fetches the weights.

The benchmark follows Ahn et al. (2018), "Soft Memory Box: A Virtual Shared Memory Framework for
Fast Deep Neural Network Training in Distributed High Performance Computing", IEEE Access 6, section
IV. Servers and workers are processes that execute commands (`bench/peer.py`). All servers have the
methods of BoxServer in `box_peer.py`, and all workers the methods of `worker.py`. Only the peers of
PyTorch's RPC, and peers that train with PyTorch, import torch.
"""
