"""Where each tensor lies in the boxes.

Tensors are cut into spans, and spans that follow one another are packed into pieces, the unit in
which differences and weights travel. Each box gets an equal share of the bytes. All workers of a
job compute the same layout from the same tensors. A layer, where layers are dropped, is some
tensors that share no piece with others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PIECE_BYTES = 2 << 20
_ALIGNMENT = 64  # bytes

_SUMMED = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_WIDTHS = _SUMMED | {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
_VERSION = 2


@dataclass(frozen=True)
class Tensor:
    """strides: as a dense tensor lies in memory; the box has the elements in the order of memory.

    kind: "parameter", "buffer", or "constant": the last are handed out once, and never change.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    kind: str

    @property
    def count(self) -> int:
        count = 1
        for length in self.shape:
            count *= length
        return count

    def __str__(self) -> str:
        shape, strides = list(self.shape), list(self.strides)
        kind = "frozen or local" if self.kind == "constant" else self.kind
        return f"{kind} {self.name} ({self.dtype} {shape}, strides {strides})"


@dataclass(frozen=True)
class Span:
    """Elements of a tensor, in the order of memory, and where they lie in their piece."""

    tensor: int
    begin: int  # elements, in the tensor
    count: int  # elements
    at: int  # elements, in the piece


@dataclass(frozen=True)
class Piece:
    """Bytes of one box's weights, all of one dtype and kind, and where their difference lies in a
    worker's slot, possibly as another dtype; constants have no slot.

    layer: whose it is, by index; 0 where nothing is dropped, and of constants
    """

    box: int
    offset: int  # bytes, in the weights
    count: int  # elements
    dtype: str
    slot_offset: int  # bytes, in the slot
    slot_dtype: str
    kind: str
    layer: int
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """Bytes of the weights."""
        return self.count * width(self.dtype)

    @property
    def slot_size(self) -> int:
        return self.count * width(self.slot_dtype)


@dataclass(frozen=True)
class Layout:
    """changing: the pieces that are not constants. weights_bytes, slot_bytes: by box."""

    tensors: tuple[Tensor, ...]
    pieces: tuple[Piece, ...]
    changing: tuple[Piece, ...]
    weights_bytes: tuple[int, ...]
    slot_bytes: tuple[int, ...]

    def manifest(self, terms: dict[str, Any]) -> bytes:
        """What all workers have to agree on."""
        return json.dumps(
            {
                "version": _VERSION,
                "boxes": len(self.weights_bytes),
                "terms": terms,
                "tensors": [
                    [t.name, t.dtype, list(t.shape), list(t.strides), t.kind] for t in self.tensors
                ],
            }
        ).encode()


def lay_out(
    tensors: Sequence[Tensor],
    boxes: int,
    transfer: str | None = None,
    layers: Sequence[Sequence[int]] = (),
) -> Layout:
    """
    Args:
        transfer: the dtype in which differences of float32 travel; None: as they are
        layers: of each the tensors, by index; none: nothing is dropped

    Raises ValueError for a dtype that a box cannot add.
    """
    for tensor in tensors:
        allowed = _WIDTHS if tensor.kind == "constant" else _SUMMED
        if tensor.dtype not in allowed:
            raise ValueError(f"{tensor}: a parameter server holds {', '.join(allowed)}")
    total = sum(tensor.count * width(tensor.dtype) for tensor in tensors)
    share = -(-total // boxes)
    most = min(PIECE_BYTES, max(share, _ALIGNMENT))
    weights, slots = [0] * boxes, [0] * boxes
    pieces: list[Piece] = []
    layer_of = {index: number for number, members in enumerate(layers) for index in members}
    for run in _runs(tensors, most, layer_of):
        first = tensors[run[0].tensor]
        slot_dtype = travels_as(first.dtype, transfer)
        layer = layer_of.get(run[0].tensor, 0)
        count = run[-1].at + run[-1].count
        box = weights.index(min(weights))
        pieces.append(
            Piece(
                box,
                weights[box],
                count,
                first.dtype,
                slots[box],
                slot_dtype,
                first.kind,
                layer,
                run,
            )
        )
        weights[box] += _aligned(count * width(first.dtype))
        if first.kind != "constant":
            slots[box] += _aligned(count * width(slot_dtype))
    changing = tuple(piece for piece in pieces if piece.kind != "constant")
    return Layout(tuple(tensors), tuple(pieces), changing, tuple(weights), tuple(slots))


def travels_as(dtype: str, transfer: str | None) -> str:
    """The dtype of differences; of weights too, but where they are read in place."""
    return transfer if transfer and dtype == "float32" else dtype


def width(dtype: str) -> int:
    """Bytes of an element."""
    return _WIDTHS[dtype]


def difference(ours: bytes, theirs: bytes) -> str | None:
    """What two manifests disagree on first, in words."""
    if ours == theirs:
        return None
    here, there = json.loads(ours), json.loads(theirs)
    ours_, theirs_ = ({**one, **one["terms"]} for one in (here, there))
    for key in ("version", "boxes", *here["terms"]):
        if ours_[key] != theirs_[key]:
            return f"{key} is {ours_[key]} here, and {theirs_[key]} there"
    for a, b in zip(here["tensors"], there["tensors"], strict=False):
        if a != b:
            return f"{Tensor(*_tuples(a))} here, {Tensor(*_tuples(b))} there"
    return f"{len(here['tensors'])} tensors here, {len(there['tensors'])} there"


def _tuples(row: list[Any]) -> Iterator[Any]:
    return (tuple(value) if isinstance(value, list) else value for value in row)


def _runs(
    tensors: Sequence[Tensor], most: int, layer_of: Mapping[int, int]
) -> Iterator[tuple[Span, ...]]:
    """Spans of at most so many bytes together, of one dtype, kind and layer."""

    def sort(index: int) -> tuple[str, str, int]:
        return tensors[index].kind, tensors[index].dtype, layer_of.get(index, 0)

    run: list[Span] = []
    current = None
    room = 0  # elements
    for index in sorted(range(len(tensors)), key=sort):
        tensor = tensors[index]
        begin = 0
        if run and current != sort(index):
            yield tuple(run)
            run = []
        if not run:
            current, room = sort(index), most // width(tensor.dtype)
        while begin < tensor.count:
            if room == 0:
                yield tuple(run)
                run, room = [], most // width(tensor.dtype)
            count = min(room, tensor.count - begin)
            run.append(Span(index, begin, count, run[-1].at + run[-1].count if run else 0))
            begin += count
            room -= count
    if run:
        yield tuple(run)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
