"""Who is measured. To add a contender, implement `Contender` and enter it here.

The first that takes part is the one that the others are compared with.
"""

from torch_hbmcomm.bench.bound import Bound
from torch_hbmcomm.bench.contender import Contender
from torch_hbmcomm.bench.deepspeed import DeepSpeed
from torch_hbmcomm.bench.mpich import Mpich
from torch_hbmcomm.bench.torch_backend import OVER_MPI, Hbm, Nothing, TorchBackend

CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Hbm("hbm-zero-copy", "hbm, on tensors from hbmcomm.memory.empty", placed=True),
        Hbm("hbm-staged", "hbm, on plain tensors"),
        Hbm("hbm-mpi", "hbm with HBMCOMM_NODE=mpi, on plain tensors", node=OVER_MPI),
        TorchBackend("gloo", "PyTorch's own backend", "gloo"),
        Mpich(),
        DeepSpeed(),
        Nothing("nothing", "a backend that does nothing: what calling one costs", "fake"),
        Bound(),
    )
}
