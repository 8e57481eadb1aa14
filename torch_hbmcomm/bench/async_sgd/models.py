"""The networks of the paper's Table 2."""

from dataclasses import dataclass

from torch_hbmcomm.bench.sizes import KIB, MIB

_PAGE = 4 * KIB


@dataclass(frozen=True)
class Model:
    """compute: seconds of a forward and backward pass."""

    name: str
    bytes: int
    compute: float

    def shrunk(self, factor: int) -> "Model":
        """Both, in proportion."""
        return Model(self.name, _pages(self.bytes / factor), self.compute / factor)


def _pages(count: float) -> int:
    return max(1, round(count / _PAGE)) * _PAGE


MODELS = {
    name: Model(name, _pages(megabytes * MIB), milliseconds / 1e3)
    for name, megabytes, milliseconds in (
        ("Inception_v1", 51.09, 189),
        ("Inception_v3", 94.30, 445),
        ("Resnet_50", 121.13, 233),
        ("Inception_resnet_v2", 214.08, 294),
        ("Resnet_152", 253.63, 218),
        ("VGG16", 527.79, 190),
    )
}
"""In the table's order, float32. Its "MB" are MiB: Inception_v1 has 13.4 million parameters."""
