"""Names that users choose from."""

from collections.abc import Iterable, Sequence


def check_names(kind: str, asked: Sequence[str], known: Iterable[str]) -> None:
    """Raises ValueError, naming those that there are, for any other."""
    unknown = [name for name in asked if name not in known]
    if unknown or not asked:
        found = ", ".join(map(repr, unknown)) or "was named"
        raise ValueError(f"no {kind} {found}; there are: {', '.join(known)}")
