"""The layout of a model in memory boxes.

Tensors are packed into shards (packing.py), the unit in which deltas and weights are sent. Each box
gets about an equal share of the bytes. All workers of a job compute the same layout from the same
tensors. To check this, they compare manifests (Layout.manifest()). With layer dropping, the tensors
of a layer share no shard with other layers.

PyTorch is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from torch_hbmcomm.parameter_server.packing import Span, TensorSpec, pack_spans

SHARD_BYTES = 2 << 20  # bytes: the most with one box
_LEAST_SHARD_BYTES = 512 << 10  # bytes: the most with many boxes
_ALIGNMENT = 64  # bytes

_SUMMED = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_WIDTHS = _SUMMED | {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
_NARROWED = {("float32", "bfloat16"), ("float64", "float32")}
_VERSION = 4


@dataclass(frozen=True)
class Shard:
    """Elements of one dtype, kind and layer that are contiguous in one box.

    box: index of the box
    offset: the shard's first byte in the box's weights
    count: the number of elements
    delta_offset: the first byte of its delta in a worker's delta buffer of that box; meaningless
        for constants
    delta_dtype: the delta's dtype, which may be narrower
    layer: index of the layer; 0 without layer dropping, and for constants
    """

    box: int
    offset: int
    count: int
    dtype: str
    delta_offset: int
    delta_dtype: str
    kind: str
    layer: int
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """The bytes of the weights."""
        return self.count * width(self.dtype)

    @property
    def delta_size(self) -> int:
        """The bytes of the delta."""
        return self.count * width(self.delta_dtype)

    def within(self, tensors: Container[int]) -> Iterator[Shard]:
        """Yield the parts of this shard that have only tensors of these indices."""
        at = 0
        for inside, group in groupby(self.spans, lambda span: span.tensor in tensors):
            spans = tuple(group)
            count = sum(span.length for span in spans)
            if inside:
                offset = self.offset + at * width(self.dtype)
                delta_offset = self.delta_offset + at * width(self.delta_dtype)
                yield replace(
                    self, offset=offset, count=count, delta_offset=delta_offset, spans=spans
                )
            at += count


@dataclass(frozen=True)
class Layout:
    """The shards of all tensors.

    changing: the shards except constants
    weights_bytes: the bytes of the weights in each box, by the box's index
    delta_bytes: the bytes of one worker's delta buffer in each box, by the box's index
    """

    tensors: tuple[TensorSpec, ...]
    shards: tuple[Shard, ...]
    changing: tuple[Shard, ...]
    weights_bytes: tuple[int, ...]
    delta_bytes: tuple[int, ...]

    @property
    def constants(self) -> tuple[Shard, ...]:
        """The shards of constants."""
        return tuple(shard for shard in self.shards if shard.kind == "constant")

    def manifest(self, terms: dict[str, Any]) -> bytes:
        """Return JSON that describes the settings and tensors that must be equal on all workers.

        terms: the settings
        """
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
    tensors: Sequence[TensorSpec],
    boxes: int,
    transfer: str | None = None,
    layers: Sequence[Sequence[int]] = (),
    shard_bytes: int | None = None,
) -> Layout:
    """Pack tensors into shards, and give each shard to the box that has the least so far.

    Args:
        transfer: the dtype of deltas on the wire, as travels_as() says
        layers: the indices of each layer's tensors; empty: no layer is dropped
        shard_bytes: the most bytes that the values of a shard take; None: SHARD_BYTES divided by
            the number of boxes. An exchange has the same number of shards in flight for each box.
            So the bytes in flight on the link of the worker do not grow with the boxes.

    Raises ValueError for a dtype that a box cannot add.
    """
    for tensor in tensors:
        allowed = _WIDTHS if tensor.kind == "constant" else _SUMMED
        if tensor.dtype not in allowed:
            raise ValueError(f"{tensor}: a parameter server holds {', '.join(allowed)}")
    total = sum(tensor.count * width(tensor.dtype) for tensor in tensors)
    share = -(-total // boxes)
    if shard_bytes is None:
        shard_bytes = min(SHARD_BYTES, max(SHARD_BYTES // boxes, _LEAST_SHARD_BYTES))
    most = min(shard_bytes, max(share, _ALIGNMENT))
    weights, deltas = [0] * boxes, [0] * boxes
    shards: list[Shard] = []
    layer_of = {index: number for number, members in enumerate(layers) for index in members}
    for kind, dtype, layer, spans in _runs(tensors, most, layer_of):
        delta_dtype = travels_as(dtype, transfer)
        count = sum(span.length for span in spans)
        box = weights.index(min(weights))
        shards.append(
            Shard(box, weights[box], count, dtype, deltas[box], delta_dtype, kind, layer, spans)
        )
        weights[box] += _aligned(count * width(dtype))
        if kind != "constant":
            deltas[box] += _aligned(count * width(delta_dtype))
    changing = tuple(shard for shard in shards if shard.kind != "constant")
    return Layout(tuple(tensors), tuple(shards), changing, tuple(weights), tuple(deltas))


def travels_as(dtype: str, transfer: str | None) -> str:
    """Return the dtype of deltas, and of weights that are not read zero-copy.

    transfer: narrows float32 to bfloat16, or float64 to float32; other dtypes are not narrowed
    """
    return transfer if transfer and (dtype, transfer) in _NARROWED else dtype


def width(dtype: str) -> int:
    """Return the bytes of an element."""
    return _WIDTHS[dtype]


def manifest_mismatch(ours: bytes, theirs: bytes) -> str | None:
    """Describe the first mismatch between two manifests; None if they are equal."""
    if ours == theirs:
        return None
    here, there = json.loads(ours), json.loads(theirs)
    ours_, theirs_ = ({**one, **one["terms"]} for one in (here, there))
    for key in ("version", "boxes", *here["terms"]):
        if ours_[key] != theirs_.get(key):
            return f"{key} is {ours_[key]} here, and {theirs_.get(key)} there"
    for a, b in zip(here["tensors"], there["tensors"], strict=False):
        if a != b:
            return f"{TensorSpec(*_tuples(a))} here, {TensorSpec(*_tuples(b))} there"
    return f"{len(here['tensors'])} tensors here, {len(there['tensors'])} there"


def _tuples(row: list[Any]) -> Iterator[Any]:
    return (tuple(value) if isinstance(value, list) else value for value in row)


def _runs(
    tensors: Sequence[TensorSpec], most: int, layer_of: Mapping[int, int]
) -> Iterator[tuple[str, str, int, tuple[Span, ...]]]:
    """Cut tensors into runs of at most `most` bytes. Yield each run's kind, dtype, layer, spans."""

    def sort(index: int) -> tuple[str, str, int]:
        return tensors[index].kind, tensors[index].dtype, layer_of.get(index, 0)

    for (kind, dtype, layer), indices in groupby(sorted(range(len(tensors)), key=sort), key=sort):
        sizes = ((index, tensors[index].count) for index in indices)
        for spans in pack_spans(sizes, most // width(dtype)):
            yield kind, dtype, layer, spans


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
