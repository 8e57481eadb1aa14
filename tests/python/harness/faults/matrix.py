"""The table: faults, moments, places and modes, and the verdict of each combination.

The first rule of RULES that applies to a combination gives its verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import combinations, product


class Fault(Enum):
    KILLED = "killed"
    STOPPED = "stopped"
    RAISES = "raises"
    EXITS = "exits early"
    CUT = "link cut"
    SLOW = "link slow"
    HOST_KILLED = "store's host killed"
    BOX_KILLED = "box killed"
    BOX_STOPPED = "box stopped"
    DISK_FULL = "box's disk full"
    CLIENT_KILLED = "client killed"
    MEMORY_FULL = "memory full"


class Moment(Enum):
    INIT = "init"
    NEW_GROUP = "new_group"
    BEFORE = "before"
    DURING = "during"
    AFTER = "after"
    CHECKPOINT = "checkpoint"
    DESTROY = "destroy"
    EXIT = "exit"


class Place(Enum):
    ONE_NODE = "one node"
    TWO_NODES = "two nodes"


class Mode(Enum):
    COLLECTIVES = "collectives"
    ASYNCHRONOUS = "asynchronous"
    HOOK = "hook"


class Verdict(Enum):
    NOTIFIED = "notified"
    TIMEOUT = "timeout"
    CONTINUES = "continues"
    REFUSED = "refused"
    ALONE = "alone"
    IMPOSSIBLE = "impossible"


MEANINGS = {
    Verdict.NOTIFIED: "each survivor has an error that names the rank, or the store, long before "
    "its timeout; it can leave with exit code 0",
    Verdict.TIMEOUT: "each survivor has an error at its timeout, which names the rank, the "
    "store or the box that is missing; it can leave with exit code 0",
    Verdict.CONTINUES: "all others finish, with right results and exit code 0",
    Verdict.REFUSED: "no rank begins: each has an error that names the cause",
    Verdict.ALONE: "the victim alone has an error, which names the cause; all others finish, with "
    "right results and exit code 0",
    Verdict.IMPOSSIBLE: "the cell cannot occur",
}

FAULTS = {
    Fault.KILLED: "SIGKILL to a rank",
    Fault.STOPPED: "SIGSTOP to a rank, for good",
    Fault.RAISES: "a rank raises an exception that is not caught",
    Fault.EXITS: "a rank exits with 0 and leaves its groups as they are",
    Fault.CUT: "the link between two machines goes down, for good",
    Fault.SLOW: "the link between two machines becomes slow",
    Fault.HOST_KILLED: "SIGKILL to rank 0, which serves the store",
    Fault.BOX_KILLED: "SIGKILL to a box with a store; started again immediately, except in *init*",
    Fault.BOX_STOPPED: "SIGSTOP to the box, for good",
    Fault.DISK_FULL: "the file system with the box's store has no byte left",
    Fault.CLIENT_KILLED: "SIGKILL to a client of the box that is not a rank",
    Fault.MEMORY_FULL: "a rank can map no more memory (`RLIMIT_AS`); at work it asks for a tensor "
    "that the machine cannot hold",
}

MOMENTS = {
    Moment.INIT: "in `init_process_group` and what makes the mode ready (connecting to the box)",
    Moment.NEW_GROUP: "the fault comes while the others wait in `new_group`",
    Moment.BEFORE: "the others wait in an operation that the victim has not begun",
    Moment.DURING: "all are in operations, one after the other",
    Moment.AFTER: "all have done an operation; the others begin the next after the fault",
    Moment.CHECKPOINT: "rank 0 saves, the others wait for it",
    Moment.DESTROY: "the others destroy their groups",
    Moment.EXIT: "all groups are destroyed, and the processes leave",
}

MODES = {
    Mode.COLLECTIVES: "`all_reduce`; where the fault is the box's, the ranks are idle clients",
    Mode.ASYNCHRONOUS: "a parameter server in a box, and a process group; an operation is an "
    "exchange. With one node the box is on another machine where the fault is the link's",
    Mode.HOOK: "DDP with `layer_drop_hook`; an operation is a step",
}

RANK_ENDS = frozenset({Fault.KILLED, Fault.RAISES, Fault.EXITS, Fault.HOST_KILLED})
RANK_GONE = RANK_ENDS | {Fault.STOPPED}
LINK = frozenset({Fault.CUT, Fault.SLOW})
BOX = frozenset({Fault.BOX_KILLED, Fault.BOX_STOPPED, Fault.DISK_FULL, Fault.CLIENT_KILLED})

_WITH_GROUP = frozenset({Mode.COLLECTIVES, Mode.HOOK})
_WITH_BOX = frozenset({Mode.ASYNCHRONOUS})
AT_WORK = frozenset({Moment.BEFORE, Moment.DURING, Moment.AFTER, Moment.CHECKPOINT})
_LEAVING = frozenset({Moment.DESTROY, Moment.EXIT})


@dataclass(frozen=True)
class Cell:
    fault: Fault
    moment: Moment
    place: Place
    mode: Mode

    @property
    def name(self) -> str:
        parts = (self.fault, self.moment, self.place, self.mode)
        return "-".join(part.value.replace(" ", "_").replace("'", "") for part in parts)

    @property
    def values(self) -> tuple[Enum, ...]:
        return self.fault, self.moment, self.place, self.mode


@dataclass(frozen=True)
class Selection:
    """Selects cells by their values. None selects all values."""

    faults: frozenset[Fault] | None = None
    moments: frozenset[Moment] | None = None
    places: frozenset[Place] | None = None
    modes: frozenset[Mode] | None = None

    def has(self, cell: Cell) -> bool:
        return (
            (self.faults is None or cell.fault in self.faults)
            and (self.moments is None or cell.moment in self.moments)
            and (self.places is None or cell.place in self.places)
            and (self.modes is None or cell.mode in self.modes)
        )


@dataclass(frozen=True)
class Rule:
    cells: Selection
    verdict: Verdict
    reason: str


def _cells(
    faults: frozenset[Fault] | Fault | None = None,
    moments: frozenset[Moment] | Moment | None = None,
    places: Place | None = None,
    modes: frozenset[Mode] | None = None,
) -> Selection:
    return Selection(
        frozenset({faults}) if isinstance(faults, Fault) else faults,
        frozenset({moments}) if isinstance(moments, Moment) else moments,
        None if places is None else frozenset({places}),
        modes,
    )


RULES = [
    Rule(
        _cells(LINK, places=Place.ONE_NODE, modes=_WITH_GROUP),
        Verdict.IMPOSSIBLE,
        "One node needs no link.",
    ),
    Rule(_cells(Fault.SLOW), Verdict.CONTINUES, "A slow link costs time and nothing else."),
    Rule(_cells(Fault.CLIENT_KILLED), Verdict.CONTINUES, "A client's death harms no other client."),
    Rule(_cells(BOX, modes=_WITH_GROUP), Verdict.CONTINUES, "Collectives do not need the box."),
    Rule(
        _cells(BOX, Moment.INIT),
        Verdict.REFUSED,
        "A worker whose box cannot be reached, or has no room, does not begin.",
    ),
    Rule(
        _cells(frozenset({Fault.BOX_KILLED, Fault.DISK_FULL})),
        Verdict.CONTINUES,
        "A box that is started again has lost nothing, and what a segment needs on the disk is "
        "reserved when it is made.",
    ),
    Rule(
        _cells(moments=Moment.EXIT),
        Verdict.CONTINUES,
        "A rank that leaves does not wait for others.",
    ),
    Rule(
        _cells(Fault.BOX_STOPPED),
        Verdict.TIMEOUT,
        "A box that is silent is not known to be dead: operations on it end at their timeout.",
    ),
    Rule(
        _cells(Fault.CUT, Moment.INIT, Place.ONE_NODE),
        Verdict.REFUSED,
        "A worker whose box cannot be reached, or has no room, does not begin.",
    ),
    Rule(
        _cells(Fault.CUT, places=Place.ONE_NODE),
        Verdict.TIMEOUT,
        "A box behind a cut link is silent, too.",
    ),
    Rule(
        _cells(Fault.CUT, AT_WORK | {Moment.DESTROY}, Place.TWO_NODES, _WITH_BOX),
        Verdict.ALONE,
        "Workers do not wait for one another, so only workers beyond a cut link notice it.",
    ),
    Rule(
        _cells(moments=Moment.DESTROY),
        Verdict.CONTINUES,
        "A rank that leaves does not wait for others.",
    ),
    Rule(
        _cells(Fault.CUT),
        Verdict.TIMEOUT,
        "A rank behind a cut link is silent, not dead: the timeout names it.",
    ),
    Rule(
        _cells(Fault.MEMORY_FULL, Moment.INIT),
        Verdict.REFUSED,
        "A rank that has no memory for a group says so on all ranks.",
    ),
    Rule(
        _cells(Fault.MEMORY_FULL, Moment.NEW_GROUP),
        Verdict.CONTINUES,
        "The first group reserves the addresses for all groups.",
    ),
    Rule(
        _cells(Fault.MEMORY_FULL),
        Verdict.ALONE,
        "Only the rank's own allocation fails. Operations use memory that the group already has.",
    ),
    Rule(
        _cells(RANK_GONE, AT_WORK, modes=_WITH_BOX),
        Verdict.CONTINUES,
        "Workers do not wait for one another.",
    ),
    Rule(
        _cells(Fault.STOPPED), Verdict.TIMEOUT, "A stopped rank is not dead: the timeout names it."
    ),
    Rule(
        _cells(frozenset({Fault.RAISES, Fault.EXITS}), Moment.INIT),
        Verdict.TIMEOUT,
        "A rank that has never come is unknown: the timeout names it.",
    ),
    Rule(_cells(RANK_ENDS), Verdict.NOTIFIED, "A death is proven, and published immediately."),
]

CELLS = [Cell(*values) for values in product(Fault, Moment, Place, Mode)]


def rule(cell: Cell) -> Rule:
    """Return the first rule that applies."""
    return next(rule for rule in RULES if rule.cells.has(cell))


def verdict(cell: Cell) -> Verdict:
    return rule(cell).verdict


def possible() -> list[Cell]:
    return [cell for cell in CELLS if verdict(cell) is not Verdict.IMPOSSIBLE]


def pairs(cell: Cell) -> Iterator[tuple[Enum, Enum]]:
    """Return all pairs of the cell's values, which are of different axes."""
    return combinations(cell.values, 2)


def covering() -> list[Cell]:
    """Return few possible cells that together have every pair of values of all possible cells.

    A greedy search always takes the cell with most uncovered pairs. Among equals it takes the cell
    whose values were chosen least often, so that all places and modes are covered evenly.
    """
    left = {pair for cell in possible() for pair in pairs(cell)}
    times: Counter[Enum] = Counter()
    chosen = []
    while left:
        best = max(
            possible(),
            key=lambda cell: (
                sum(pair in left for pair in pairs(cell)),
                -sum(times[value] for value in cell.values),
            ),
        )
        chosen.append(best)
        times.update(best.values)
        left.difference_update(pairs(best))
    return chosen
