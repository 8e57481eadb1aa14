"""All combinations of a test's parameters, each in a tier of the tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import product
from typing import Any

import pytest
from _pytest.mark import ParameterSet

Axis = Iterable[Any] | Mapping[str, Any]  # values, or values by name


def cases(*axes: Axis, quick: Collection[str], long: Collection[str] = ()) -> list[ParameterSet]:
    """Return the product of the axes. Each case has the name that pytest would give it.

    `quick` and `long` name the cases of these tiers. All other cases are in the full tier.
    """
    named = [axis if isinstance(axis, Mapping) else dict(map(_named, axis)) for axis in axes]
    made = {"-".join(names): names for names in product(*named)}
    unknown = {*quick, *long} - made.keys()
    assert not unknown, f"no such cases: {sorted(unknown)}"
    marks = dict.fromkeys(made, (pytest.mark.full,)) | dict.fromkeys(long, (pytest.mark.long,))
    return [
        pytest.param(
            *(axis[name] for axis, name in zip(named, names, strict=True)),
            id=case,
            marks=() if case in quick else marks[case],
        )
        for case, names in made.items()
    ]


def _named(value: Any) -> tuple[str, Any]:
    return getattr(value, "__name__", str(value)), value
