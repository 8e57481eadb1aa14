"""What a run found, and its JSON form.

    {"machine": {"cpu", "cores", "python", "torch_hbmcomm", "time"},
     "sections": {name: what it compares}, "unavailable": {section: why},
     "rows": [{"section", "case", "contender", "values": {name: number}, "samples": {name: [...]}},
              ...]}

The names of values and samples end in their units; a share is of 1. columns.py lists most;
besides there are, of a hook that drops, "steps" that it counted and the "aim" of "counted_share",
and as samples of the section training the points of its curves, means over the seeds: "steps",
"seconds", "loss" and "accuracy" by epoch. A contender "paper: ..." is what Lee et al. (2020) found.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from torch_hbmcomm.bench.layer_drop.section import Row
from torch_hbmcomm.bench.machine import Machine


@dataclass(frozen=True)
class Result:
    machine: Machine
    sections: dict[str, str]
    unavailable: dict[str, str]
    rows: list[Row]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def machine_line(result: Result) -> str:
    return f"{result.machine['cpu']}, {result.machine['cores']} cores"
