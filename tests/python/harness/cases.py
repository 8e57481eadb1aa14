"""Products of a test's parameters, of which the quick tier takes some cases."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import product
from typing import Any

import pytest
from _pytest.mark import ParameterSet

Axis = Iterable[Any] | Mapping[str, Any]  # values, or values by name


def cases(*axes: Axis, quick: Collection[str]) -> list[ParameterSet]:
    """The product of the axes, each case named as pytest would. All that `quick` does not name are
    for the full tier."""
    named = [axis if isinstance(axis, Mapping) else dict(map(_named, axis)) for axis in axes]
    made = {"-".join(names): names for names in product(*named)}
    assert made.keys() >= set(quick), f"no such cases: {sorted(set(quick) - made.keys())}"
    return [
        pytest.param(
            *(axis[name] for axis, name in zip(named, names, strict=True)),
            id=case,
            marks=() if case in quick else pytest.mark.full,
        )
        for case, names in made.items()
    ]


def _named(value: Any) -> tuple[str, Any]:
    return getattr(value, "__name__", str(value)), value
