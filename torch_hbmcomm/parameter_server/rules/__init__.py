"""Update rules. Another one is a file like these, and a line here if it is to have a name."""

from __future__ import annotations

from torch_hbmcomm.parameter_server.rules.downpour import Downpour
from torch_hbmcomm.parameter_server.rules.elastic import Elastic
from torch_hbmcomm.parameter_server.rules.rule import Rule

__all__ = ["Downpour", "Elastic", "Rule", "named"]

_NAMES: dict[str, type[Rule]] = {"downpour": Downpour, "easgd": Elastic}


def named(rule: str | Rule) -> Rule:
    """Raises ValueError for a name that no rule has."""
    if isinstance(rule, Rule):
        return rule
    if rule not in _NAMES:
        raise ValueError(f"rule {rule!r} is none of {', '.join(_NAMES)}, nor a Rule")
    return _NAMES[rule]()
