"""Durations, written for people."""


def format_time(microseconds: float) -> str:
    """Three digits that matter: "9.87 µs", "12.3 ms", "1.05 s"."""
    for unit, factor in (("µs", 1.0), ("ms", 1e-3), ("s", 1e-6)):
        value = microseconds * factor
        if value < 999.5 or unit == "s":
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {unit}"
