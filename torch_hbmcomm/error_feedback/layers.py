"""Layers: parameters that are sent, or wait, together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Shape(NamedTuple):
    """A parameter's name, and the numbers of its dimensions and elements.

    width: bytes of an element on the wire.
    sizes: the dimensions' lengths in the order of memory, empty if no caller needs them.
    """

    name: str
    dimensions: int
    numel: int
    width: int
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layer:
    """Parameters that are sent or dropped together.

    parameters: their names.
    members: their indices among the shapes that the layers were made of.
    numel: the number of elements of all these parameters.
    nbytes: the bytes of all these parameters on the wire.
    always: True if they are sent whole in every step.
    """

    parameters: tuple[str, ...]
    members: tuple[int, ...]
    numel: int
    nbytes: int
    always: bool

    @property
    def name(self) -> str:
        return ", ".join(self.parameters)

    @classmethod
    def of(cls, shapes: Sequence[Shape], members: Sequence[int], always: bool) -> Layer:
        """Make a layer of some of the shapes, by their indices."""
        own = [shapes[index] for index in members]
        return cls(
            parameters=tuple(shape.name for shape in own),
            members=tuple(members),
            numel=sum(shape.numel for shape in own),
            nbytes=sum(shape.numel * shape.width for shape in own),
            always=always,
        )
