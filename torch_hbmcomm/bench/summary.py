"""The statistics that a result keeps of its samples."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

_ENOUGH = 200  # samples for a 99th percentile
_DIGITS = 6  # decimals in a record: tables round to fewer


@dataclass(frozen=True)
class Summary:
    """Statistics of samples, in the unit of the samples.

    n: number of samples.
    p99: 99th percentile; None below 200 samples.
    """

    n: int
    minimum: float
    lower_quartile: float
    median: float
    upper_quartile: float
    maximum: float
    mean: float
    p99: float | None = None

    @classmethod
    def of(cls, samples: Sequence[float]) -> Summary:
        """Summarise at least one sample. Quartiles are interpolated between samples."""
        found = list(samples) if len(samples) > 1 else [*samples, *samples]
        lower, _, upper = statistics.quantiles(found, n=4, method="inclusive")
        return cls(
            n=len(samples),
            minimum=min(samples),
            lower_quartile=lower,
            median=statistics.median(samples),
            upper_quartile=upper,
            maximum=max(samples),
            mean=statistics.fmean(samples),
            p99=statistics.quantiles(samples, n=100)[98] if len(samples) >= _ENOUGH else None,
        )

    @classmethod
    def names(cls, prefix: str, unit: str) -> dict[str, str]:
        """Return the name of each field in a record, by the name of the field in this class."""
        counted = {"n": f"{prefix}n"}
        return counted | {one.name: f"{prefix}{one.name}_{unit}" for one in fields(cls)[1:]}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], prefix: str, unit: str) -> Summary | None:
        """Return the summary in a record; None if the record has none."""
        found = {
            field: record[name] for field, name in cls.names(prefix, unit).items() if name in record
        }
        return cls(**found) if found else None

    def to_record(self, prefix: str, unit: str) -> dict[str, float]:
        """Return the names and rounded values for a record. A field that is None is left out."""
        values = {name: getattr(self, field) for field, name in self.names(prefix, unit).items()}
        return {name: round(one, _DIGITS) for name, one in values.items() if one is not None}
