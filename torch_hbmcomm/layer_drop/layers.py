"""What is sent or dropped as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_hbmcomm.layer_drop.terms import LayerDrop


class Shape(NamedTuple):
    """Of a parameter. width: bytes of an element on the wire."""

    name: str
    dimensions: int
    numel: int
    width: int


@dataclass(frozen=True)
class Layer:
    """
    parameters: their names.
    members: where they are among the shapes that it was made of.
    nbytes: on the wire.
    always: it is never dropped.
    """

    parameters: tuple[str, ...]
    members: tuple[int, ...]
    numel: int
    nbytes: int
    always: bool

    @property
    def name(self) -> str:
        return ", ".join(self.parameters)


def layers_of(shapes: Sequence[Shape], terms: LayerDrop) -> list[Layer]:
    """In the order of the first member of each."""
    members: dict[str, list[int]] = {}
    for index, shape in enumerate(shapes):
        module = terms.granularity == "module"
        key = shape.name.rpartition(".")[0] if module else shape.name
        members.setdefault(key, []).append(index)
    return [_layer(shapes, tuple(indices), terms) for indices in members.values()]


def _layer(shapes: Sequence[Shape], members: tuple[int, ...], terms: LayerDrop) -> Layer:
    own = [shapes[index] for index in members]
    numel = sum(shape.numel for shape in own)
    return Layer(
        parameters=tuple(shape.name for shape in own),
        members=members,
        numel=numel,
        nbytes=sum(shape.numel * shape.width for shape in own),
        always=numel < terms.min_numel or all(shape.dimensions < 2 for shape in own),
    )
