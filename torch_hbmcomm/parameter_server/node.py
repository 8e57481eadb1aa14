"""The ranks of a node as one worker of a job (`aggregate="node"`).

Lee et al. 2020, section 2, call this hybrid aggregation: sums within a node, and one process of
each node at the server. The first rank of a node, its *leader*, has the AsyncWorker. So the boxes
see a single worker for each node, with an entry in the membership table, a lease, a clock, and a
delta buffer. The boxes add each delta of the node exactly once. The entry has the number of ranks,
by which rules scale deltas.

In a call the ranks meet (all_gather), and agree on the call. They sum their changes at the leader
(reduce). The leader exchanges with the boxes. All ranks take the leader's model (broadcast). If
layers are dropped, the sum of the unsent changes is in the node's model, which only the leader has.
The models of the ranks are copies, in which AsyncWorker.copy_model divides the unsent changes.

The ranks use a group of their own, and only in the thread that calls ParameterServer. If a rank
dies, this group fails, and the calls of the node's other ranks raise an error that names the dead
rank. Their leader leaves the job in close(), or its lease ends. Other nodes have other groups, and
see a worker that has left or died.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from torch_hbmcomm import smb
from torch_hbmcomm.groups import hbm_backend, split_group
from torch_hbmcomm.native import load
from torch_hbmcomm.parameter_server.layout import Layout
from torch_hbmcomm.parameter_server.packing import TensorSpec
from torch_hbmcomm.parameter_server.replica import Model
from torch_hbmcomm.parameter_server.shared_model import SharedModel
from torch_hbmcomm.parameter_server.worker import SENDING, AsyncWorker, Call, Plan
from torch_hbmcomm.tensors import flat, is_finite

_WAITS = 2  # waits of a leader for other workers in an exchange, each at most their timeout
_ENDS = (Call.FINISH, Call.CLOSE)


class Disagreement(RuntimeError):
    """A rank of the node cannot make a call, or the ranks make different calls. Nothing has moved,
    and the ranks may continue."""


def nodes_of(group: dist.ProcessGroup) -> list[list[int]]:
    """Return the ranks of each node, as numbered in the group, without communication.

    Ranks are on one node if they share a machine, its network namespace and HBMCOMM_NODE_ID.

    Raises ValueError if the group's CPU backend is not hbm.
    """
    nodes: dict[str, list[int]] = {}
    networks = hbm_backend(group, 'ParameterServer(aggregate="node")').networks()
    for rank, network in enumerate(networks):
        nodes.setdefault(network, []).append(rank)
    return list(nodes.values())


def split_nodes(
    group: dist.ProcessGroup, nodes: Sequence[Sequence[int]], timeout: float
) -> dist.ProcessGroup | None:
    """Form a group of the ranks of each node. Collective. Returns this rank's; None if it is alone.

    timeout: the most seconds that a leader waits for other workers at a time
    """
    options = hbm_backend(group, 'ParameterServer(aggregate="node")').options
    return split_group(
        group,
        [ranks for ranks in nodes if len(ranks) > 1],
        timeout=options._timeout + timedelta(seconds=_WAITS * timeout),
        pg_options=load().Options(
            memory=options.memory,
            transport=options.transport,
            staging_bytes=options.staging_bytes,
            reduce_threads=options.reduce_threads,
            parameter_server="",
            heartbeat_timeout=options.heartbeat_timeout,
        ),
        group_desc="parameter server's node",
    )


class _Flats:
    """Copies of a layout's changing tensors, in one tensor for each dtype.

    by_index: the copies, in one dimension, by the tensors' indices; constants are empty
    """

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        counts: dict[str, int] = {}
        for spec in tensors:
            if spec.kind != "constant":
                counts[spec.dtype] = counts.get(spec.dtype, 0) + spec.count
        whole = {dtype: torch.zeros(n, dtype=getattr(torch, dtype)) for dtype, n in counts.items()}
        self.whole = list(whole.values())
        self.by_index: list[torch.Tensor] = []
        used = dict.fromkeys(counts, 0)
        for spec in tensors:
            if spec.kind == "constant":
                self.by_index.append(torch.empty(0))
                continue
            begin = used[spec.dtype]
            used[spec.dtype] = begin + spec.count
            self.by_index.append(whole[spec.dtype][begin : begin + spec.count])


class _NodeModel:
    """The model that the leader's worker trains: the node's changing tensors, and the constants of
    the leader's own model."""

    def __init__(self, own: SharedModel, node: _Flats, layout: Layout) -> None:
        self._own = own
        self._node = node
        self._tensors = layout.tensors

    def find(self, everything: bool = False) -> list[torch.Tensor]:
        if not everything:
            return self._node.by_index
        own = self._own.find(everything)
        return [
            mine if spec.kind == "constant" else node
            for spec, mine, node in zip(self._tensors, own, self._node.by_index, strict=True)
        ]


@dataclass(frozen=True)
class _Outcome:
    """The leader's message at the end of a call.

    broken: the index of the tensor that AsyncWorker.act() named; -1: none
    index: the worker's number in the job
    counts: AsyncWorker.counts()
    """

    broken: int
    index: int
    counts: dict[str, int | float]


class NodeWorker:
    """A rank of a node whose ranks are one worker. Has the methods of AsyncWorker.

    The constructor and meet() are collectives of the node, and so is act() after each meet().

    A rank in finish() or close() takes part in the others' calls until all ranks are there. Apart
    from this the ranks make the same calls in the same order.

    Args:
        group: the ranks of the node
        plan: the plan of this rank's model, equal on all ranks
        join: makes the worker that trains a model, for a number of processes; called on the leader

    Raises:
        Disagreement: nothing has moved
        DistBackendError: another rank of the node has died or failed
        TimeoutError, MemoryError, ValueError, smb.BoxError: the leader's AsyncWorker raised it;
            every rank raises it
        RuntimeError: the leader's AsyncWorker raised another error

    Threads: one at a time.
    """

    def __init__(
        self, group: dist.ProcessGroup, plan: Plan, join: Callable[[Model, int], AsyncWorker]
    ) -> None:
        self._group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._own = plan.model
        self._layout = plan.layout
        self._selection = plan.selection
        # The model that this rank took last. During a call: this rank's change, then the sum.
        self._taken = _Flats(plan.layout.tensors)
        self._worker: AsyncWorker | None = None
        self._changed = False
        counts: dict[str, int | float] = {"workers": 0, "ahead": 0, **plan.selection.stats()}
        self._outcome = _Outcome(-1, -1, counts)
        self._culprits: list[int] = []  # ranks whose own change was not finite in the last call
        with ExitStack() as resources:
            resources.callback(self._leave_group)
            with self._naming_node():
                self._lead(lambda: self._join(plan, join, resources))
                self._share(everything=True)
            self._resources = resources.pop_all()

    @property
    def leads(self) -> bool:
        """True: this rank exchanges with the boxes."""
        return dist.get_rank() == self._leader

    @property
    def who(self) -> str:
        """The worker and its ranks, for the warning of a refused update."""
        index = self._outcome.index
        return f"worker {index}, {self._node_name}, because of ranks {self._culprits}"

    def meet(self, call: Call, changed: bool) -> Call:
        """Agree on a call with the other ranks. Returns the call to pass to act().

        changed: True: the model has changed since act() last sent its changes
        """
        try:
            self._own.find(everything=call is Call.LOAD)
        except RuntimeError as error:
            self.withdraw(call, error)
            raise Disagreement(str(error)) from error
        calls, changes = self._tell(call, changed)
        self._changed = any(changes)
        return self._common_call(calls)

    def withdraw(self, call: Call, problem: Exception) -> None:
        """Let the other ranks raise that this one cannot make a call."""
        self._tell(call, False, problem)

    def act(self, call: Call) -> str | None:
        """Sum the ranks' changes, let the leader act, and take its model.

        Returns the name of a tensor if the update of the node was refused.
        """
        with self._naming_node():
            if call in SENDING and self._changed:
                self._sum()
            self._lead(lambda: self._act(call))
            broken = self._outcome.broken
            if broken >= 0:
                self._culprits = self._find_culprits(broken)
            if call is Call.SAVE:
                self._share_selection()
            if call is not Call.WAIT:
                self._share(everything=call is Call.LOAD)
        return self._layout.tensors[broken].name if broken >= 0 else None

    def read(self, tensors: Sequence[torch.Tensor]) -> None:
        raise AssertionError("rules that read first are refused")

    def stats(self) -> dict[str, int | float]:
        """Return AsyncWorker.stats(). On ranks that do not lead, the bytes are 0, and the other
        counts are as of the node's last call."""
        if self._worker is not None:
            return self._worker.stats()
        return {"pushed_bytes": 0, "pulled_bytes": 0, **self._outcome.counts}

    def abandon(self) -> None:
        """Let the next calls of the node's other ranks raise. Call it before close(), if this rank
        cannot take part any more."""
        if self._has_group:
            self._group.abort()

    def close(self) -> None:
        """Leave the job and the node's group, without sending anything."""
        self._resources.close()

    # -- the leader ------------------------------------------------------------------------------

    @property
    def _leader(self) -> int:
        """The leader's rank in the job."""
        return self._ranks[0]

    @property
    def _node_name(self) -> str:
        return f"the node of ranks {self._ranks}"

    def _join(
        self, plan: Plan, join: Callable[[Model, int], AsyncWorker], resources: ExitStack
    ) -> None:
        self._node = _Flats(plan.layout.tensors)
        self._copy_own_model()
        model = _NodeModel(plan.model, self._node, plan.layout)
        self._worker = join(model, len(self._ranks))
        resources.callback(self._worker.close)

    def _copy_own_model(self) -> None:
        """Make the leader's own model the node's."""
        for tensor, node in zip(self._own.find(), self._node.by_index, strict=True):
            node.copy_(flat(tensor))

    def _act(self, call: Call) -> str | None:
        assert self._worker is not None
        if call is Call.LOAD:
            self._copy_own_model()
        self._worker.meet(call, self._changed)
        return self._worker.act(call)

    def _lead(self, act: Callable[[], str | None]) -> None:
        """Call act() on the leader, and set the outcome on every rank. Collective.

        If act() raises, the leader raises the same, and the other ranks an error with its text.
        """
        error: Exception | None = None
        keys = list(self._outcome.counts)
        numbers = torch.zeros(3 + len(keys), dtype=torch.float64)
        if self.leads:
            try:
                name = act()
                assert self._worker is not None
                broken = -1 if name is None else self._index_of(name)
                counts = self._worker.counts()
                found = [0, broken, self._worker.index, *(counts[key] for key in keys)]
                numbers = torch.tensor(found, dtype=torch.float64)
            except Exception as raised:
                error = raised
                numbers[0] = 1
        dist.broadcast(numbers, src=self._leader, group=self._group)
        failed, broken, index = (int(number) for number in numbers[:3])
        if failed:
            self._raise_leaders(error)
        values = (int(value) if value.is_integer() else value for value in numbers[3:].tolist())
        self._outcome = _Outcome(broken, index, dict(zip(keys, values, strict=True)))

    def _raise_leaders(self, error: Exception | None) -> NoReturn:
        """Raise the leader's error on every rank. Collective. error: None on the other ranks"""
        told: list[Any] = [None if error is None else (_kind(error), str(error))]
        dist.broadcast_object_list(told, src=self._leader, group=self._group)
        if error is not None:
            raise error
        kind, text = told[0]
        raise kind(f"rank {self._leader}, which exchanges for {self._node_name}: {text}")

    # -- sums and copies -------------------------------------------------------------------------

    def _sum(self) -> None:
        """Add the ranks' changes since they took a model to the node's model. Collective."""
        for tensor, taken in zip(self._own.find(), self._taken.by_index, strict=True):
            torch.sub(flat(tensor), taken, out=taken)
        for change in self._taken.whole:
            dist.reduce(change, dst=self._leader, group=self._group)
        if self._worker is not None:
            for node, change in zip(self._node.whole, self._taken.whole, strict=True):
                node.add_(change)

    def _share(self, everything: bool = False) -> None:
        """Copy the leader's model to every rank. Collective. everything: constants too"""
        if self._worker is not None:
            self._worker.copy_model(self._taken.by_index, len(self._ranks))
        for values in self._taken.whole:
            dist.broadcast(values, src=self._leader, group=self._group)
        tensors = self._own.find(everything)
        for spec, tensor, taken in zip(
            self._layout.tensors, tensors, self._taken.by_index, strict=True
        ):
            if spec.kind != "constant":
                flat(tensor).copy_(taken)
            elif everything and tensor.numel() > 0:
                dist.broadcast(flat(tensor), src=self._leader, group=self._group)

    def _share_selection(self) -> None:
        """Load the state of the leader's selection on the other ranks. Collective."""
        state = [self._selection.state_dict()]
        dist.broadcast_object_list(state, src=self._leader, group=self._group)
        if not self.leads:
            self._selection.load_state_dict(state[0])

    def _find_culprits(self, tensor: int) -> list[int]:
        """Return the ranks whose own tensor of that index is not finite. Collective.

        REQUIRES: this rank has not taken the leader's model since the sum.
        """
        finite = self._gather([is_finite(self._own.find()[tensor])])
        return [rank for rank, (fine,) in zip(self._ranks, finite, strict=True) if not fine]

    def _index_of(self, name: str) -> int:
        return [spec.name for spec in self._layout.tensors].index(name)

    # -- meetings --------------------------------------------------------------------------------

    def _tell(
        self, call: Call, changed: bool, problem: Exception | None = None
    ) -> tuple[list[Call], list[bool]]:
        """Exchange the calls of all ranks, and whether their models have changed. Collective.

        problem: why this rank cannot make the call. Unless it has one itself, raises Disagreement
        with another rank's.
        """
        known = list(Call)
        with self._naming_node():
            rows = self._gather([known.index(call), changed, problem is not None])
            calls = [known[index] for index, *_ in rows]
            if any(row[2] for row in rows):
                text = None if problem is None else f"{type(problem).__name__}: {problem}"
                texts: list[str | None] = [None] * len(rows)
                dist.all_gather_object(texts, text, group=self._group)
                if problem is None:
                    self._raise_problem(calls, texts)
        return calls, [bool(changed) for _, changed, _ in rows]

    def _raise_problem(self, calls: Sequence[Call], texts: Sequence[str | None]) -> NoReturn:
        for rank, call, text in zip(self._ranks, calls, texts, strict=True):
            if text is not None:
                raise Disagreement(
                    f"rank {rank} of the node cannot take part in {call.value}: {text}"
                )
        raise AssertionError("a rank has a problem")

    def _common_call(self, calls: Sequence[Call]) -> Call:
        """Return the call that all ranks make, where finish() and close() follow other calls."""
        others = set(calls) - set(_ENDS)
        if len(others) > 1 or (Call.LOAD in others and len(set(calls)) > 1):
            by_call: dict[Call, list[int]] = {}
            for rank, call in zip(self._ranks, calls, strict=True):
                by_call.setdefault(call, []).append(rank)
            who = "; ".join(f"{call.value} by ranks {ranks}" for call, ranks in by_call.items())
            raise Disagreement(
                f'the ranks of a node disagree on the call: {who}. With aggregate="node" they '
                "make the same calls in the same order, until they call finish() or close()"
            )
        if others:
            return others.pop()
        return Call.FINISH if Call.FINISH in calls else Call.CLOSE

    def _gather(self, row: Sequence[int]) -> list[list[int]]:
        """Exchange rows of equal length. Collective. Returns every rank's row."""
        own = torch.tensor(row, dtype=torch.int64)
        table = torch.empty((len(self._ranks), len(row)), dtype=torch.int64)
        dist.all_gather(list(table), own, group=self._group)
        rows: list[list[int]] = table.tolist()
        return rows

    # -- errors and the end ----------------------------------------------------------------------

    @contextmanager
    def _naming_node(self) -> Iterator[None]:
        """Name the node in errors of its group, and its ranks by their numbers in the job."""

        def in_job(found: re.Match[str]) -> str:
            return str(self._ranks[int(found[0])])

        try:
            yield
        except dist.DistBackendError as error:
            text = re.sub(r"(?<=\brank )\d+|\b\d+(?= \(pid \d+ on )", in_job, str(error))
            raise dist.DistBackendError(
                f"{self._node_name} is one worker of a ParameterServer, and a rank of it failed: "
                f"{text}. Close the ParameterServer: the workers of other nodes continue"
            ) from error

    @property
    def _has_group(self) -> bool:
        """False: the user has destroyed all groups."""
        return self._group in dist.distributed_c10d._world.pg_map

    def _leave_group(self) -> None:
        if self._has_group:
            dist.destroy_process_group(self._group)


def _kind(error: Exception) -> type[Exception]:
    """Return the class of the error that the ranks raise if their leader has raised `error`."""
    if isinstance(error, smb.BoxError):
        return type(error)
    for kind in (TimeoutError, MemoryError, ValueError):
        if isinstance(error, kind):
            return kind
    return RuntimeError
