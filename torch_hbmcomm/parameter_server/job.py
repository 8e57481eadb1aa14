"""A worker's place in a job of a ParameterServer: how it joins, begins and leaves."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server.config import AsyncConfig
from torch_hbmcomm.parameter_server.exchange import LayerVersions
from torch_hbmcomm.parameter_server.layout import Layout, manifest_mismatch
from torch_hbmcomm.parameter_server.roster import Roster
from torch_hbmcomm.parameter_server.sharding import ShardedWeights, too_small


class AsyncJob:
    """A worker's place in the job, and what it has attached in the boxes.

    leads: whether this worker has to write the first weights, and call publish() then
    versions: of layers, where `layers` of them may be dropped; None: they all travel

    Raises:
        ValueError: the model or the config is not the other workers'
        RuntimeError: all others have left while this one came
        MemoryError, TimeoutError, smb.BoxError
    """

    def __init__(
        self,
        boxes: Sequence[smb.Box],
        name: str,
        layout: Layout,
        config: AsyncConfig,
        layers: int,
    ) -> None:
        self._name = name
        self._temporary = not config.keep
        with ExitStack() as leaving:
            try:
                self.roster = Roster(boxes[0], name, config.timeout, self._temporary)
            except MemoryError as error:
                raise too_small(boxes[0], layout, 0, error) from error
            leaving.callback(self.roster.leave)
            self.leads = self.roster.leads()
            if not self.leads:
                self.roster.begin_anew()
            manifest = layout.manifest(config.manifest_terms)
            mode: Literal["auto", "attach"] = "auto" if self.leads else "attach"
            try:
                if not self.leads:
                    self._compare(boxes[0], manifest, leaving)
                self.weights = ShardedWeights(boxes, name, layout, mode, self._temporary)
                leaving.callback(self.weights.close)
                self.versions = None
                if layers:
                    self.versions = self._attach_versions(boxes[0], layout, layers, mode)
                    leaving.callback(self.versions.close)
            except smb.NoSuchKey as error:
                raise RuntimeError(
                    f"the other workers of {name!r} have just left; start this one again"
                ) from error
            if self.leads:
                self._write_manifest(boxes[0], manifest, leaving)
            self._leaving = leaving.pop_all()

    def publish(self) -> None:
        """Let the others begin: this worker, which leads, has written the weights."""
        mark = 1 + secrets.randbits(62)
        self.weights.mark(mark)
        self.roster.publish(mark)

    def close(self) -> None:
        """Leave the job."""
        self._leaving.close()

    def _write_manifest(self, box: smb.Box, manifest: bytes, leaving: ExitStack) -> None:
        key = f"{self._name}/manifest"
        segment = box.alloc(len(manifest), key, temporary=self._temporary)
        leaving.callback(segment.free)
        segment.write(0, len(manifest), source=manifest)

    def _compare(self, box: smb.Box, manifest: bytes, leaving: ExitStack) -> None:
        """Raise ValueError when the manifest is not the one that the first worker has written."""
        segment = box.alloc(None, f"{self._name}/manifest", "attach")
        leaving.callback(segment.free)
        segment.read()
        if why := manifest_mismatch(manifest, bytes(segment.buffer)):
            raise ValueError(f"this worker does not fit the others of {self._name!r}: {why}")

    def _attach_versions(
        self, box: smb.Box, layout: Layout, layers: int, mode: Literal["auto", "attach"]
    ) -> LayerVersions:
        try:
            return LayerVersions(box, self._name, layers, mode, self._temporary)
        except MemoryError as error:
            raise too_small(box, layout, 0, error) from error
