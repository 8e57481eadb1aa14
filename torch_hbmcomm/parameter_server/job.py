"""A worker's part in a job of a ParameterServer: how it joins, begins and leaves."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server.config import AsyncConfig
from torch_hbmcomm.parameter_server.exchange import SENDS, Exchange, LayerVersions
from torch_hbmcomm.parameter_server.layout import Layout, manifest_mismatch
from torch_hbmcomm.parameter_server.membership import MembershipTable
from torch_hbmcomm.parameter_server.sharding import JobSegments, ShardedValues


class AsyncJob:
    """A worker's membership in the job, and its segments in the boxes.

    leads: True: this worker must write the first weights, and then call publish()
    versions: the version counters of `layers` layers; None: no layer is dropped
    processes: the number of processes that train for this worker
    process: the process of the first box, if a process group has started it; else ""

    Raises:
        ValueError: the model or the config differs between workers
        RuntimeError: all other workers left while this one joined, or too many have joined
        MemoryError: a box is too small
        TimeoutError: the first worker did not write the weights in time
        smb.BoxError: an error of a box
    """

    def __init__(
        self,
        boxes: Sequence[smb.Box],
        name: str,
        layout: Layout,
        config: AsyncConfig,
        layers: int,
        processes: int,
    ) -> None:
        segments = JobSegments(
            boxes, name, layout.weights_bytes, layout.delta_bytes, temporary=not config.keep
        )
        self.process = boxes[0].process
        with ExitStack() as leaving:
            with segments.naming_needs(0):
                self.membership = MembershipTable(
                    boxes[0], name, config.timeout, not config.keep, processes
                )
            leaving.callback(self.membership.leave)
            leaving.callback(segments.free)
            with segments.naming_needs(0):
                self.leads = self.membership.leads()
            if not self.leads:
                self.membership.begin_again()
            manifest = layout.manifest(config.manifest_terms)
            mode: Literal["auto", "attach"] = "auto" if self.leads else "attach"
            try:
                if not self.leads:
                    _compare(segments, name, manifest)
                self.weights = ShardedValues(segments, layout, "weights", mode)
                self.exchange = Exchange(
                    segments, self.weights, narrow=config.narrows_weights, sends=SENDS
                )
                self.versions = LayerVersions(segments, layers, mode) if layers else None
            except smb.NoSuchKey as error:
                raise RuntimeError(
                    f"the other workers of {name!r} have just left; start this one again"
                ) from error
            if self.leads:
                segments.alloc(0, len(manifest), "manifest").write(source=manifest)
            self._leaving = leaving.pop_all()

    def publish(self) -> None:
        """Let the other workers begin. REQUIRES: this worker leads, and has written the weights."""
        mark = 1 + secrets.randbits(62)
        self.weights.mark(mark)
        self.membership.publish(mark)

    def close(self) -> None:
        """Leave the job."""
        self._leaving.close()


def _compare(segments: JobSegments, name: str, manifest: bytes) -> None:
    """Raise ValueError if the manifest is not the one that the first worker has written."""
    segment = segments.alloc(0, None, "manifest", "attach")
    segment.read()
    if why := manifest_mismatch(manifest, bytes(segment.buffer)):
        raise ValueError(f"this worker does not fit the others of {name!r}: {why}")
