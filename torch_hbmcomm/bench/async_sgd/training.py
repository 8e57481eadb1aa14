"""What sections find whose workers train with PyTorch."""

from dataclasses import dataclass

SHM = "ParameterServer shm"
TCP = "ParameterServer tcp"
DDP = "DDP"


@dataclass(frozen=True)
class Training:
    """case: what the contender trained under. samples: in the section's unit."""

    section: str
    contender: str
    case: str
    samples: list[float]
