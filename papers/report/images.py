"""Images a second over ranks, on the host and in containers: Panda 2019."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.containers.podman import Division
from papers.images.__main__ import communication, images_a_second
from papers.images.rank import ALONE, GLOO, HBM, MPI
from papers.report.experiment import Experiment, Label, Run
from papers.report.verdicts import (
    EQUAL,
    PANDA,
    Claim,
    Outcome,
    Spread,
    Unmeasured,
    change,
    graded,
    percent,
    samples,
)
from torch_hbmcomm.bench.report import Row, rows
from torch_hbmcomm.bench.result import Result

_RUN = "images"
_PEERS = {GLOO: "Gloo", MPI: "MPI in C"}
_COMMUNICATING = {HBM: "hbm", **_PEERS}
_COMPARED = (*_COMMUNICATING, ALONE)
_HOST = str(Division(0))
_CNTK = 1.2  # the paper's largest gain with CNTK
_TENSORFLOW = 1.35  # the paper's gain with TensorFlow and the most processes


def _rows(results: Mapping[str, Result]) -> list[Row]:
    return rows(results[_RUN].measurements)


def _table(results: Mapping[str, Result]) -> Table:
    lines = []
    for row in _rows(results):
        rates = {name: images_a_second(row, name) for name in row}
        of = row[HBM].of
        lines.append(
            [of["where"], str(of["ranks"])]
            + [f"{rates[name]:.1f}" if name in rates else "-" for name in _COMPARED]
            + [
                f"{rates[HBM] / rates[name]:.2f}" if name in rates else "-"
                for name in _COMPARED[1:]
            ]
            + [
                percent(communication(row, name)) if {name, ALONE} <= set(row) else "-"
                for name in _COMMUNICATING
            ]
        )
    heading = ["where", "ranks", *(f"{name}, images/s" for name in _COMPARED)]
    heading += [f"{HBM} / {name}" for name in _COMPARED[1:]]
    return Table([*heading, *(f"communication, {name}" for name in _COMMUNICATING)], lines)


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    over_ranks = Panel("on the host", "ranks", "images/s")
    shares = Panel("on the host", "ranks", "communication, share of a step")
    divided = Panel("over containers", y="images/s")
    for row in _rows(results):
        of = row[HBM].of
        for name in row:
            rate = images_a_second(row, name)
            if of["where"] != _HOST:
                divided.bars.setdefault(name, []).append(rate)
                continue
            _point(over_ranks, name, of["ranks"], rate)
            if name != ALONE and ALONE in row:
                _point(shares, name, of["ranks"], communication(row, name))
        if of["where"] != _HOST:
            divided.labels = [*divided.labels, f"{of['where']}\n{of['ranks']} ranks"]
    return [over_ranks, shares, divided] if divided.bars else [over_ranks, shares]


def _point(panel: Panel, name: str, x: int, y: float) -> None:
    xs, ys, _ = panel.lines.setdefault(name, ([], [], "-"))
    xs.append(x)
    ys.append(y)


def _setting(results: Mapping[str, Result]) -> list[str]:
    """Return the net of the record, and the sizes of DDP's buckets."""
    buckets = next((row[MPI].curves["buckets_bytes"] for row in _rows(results) if MPI in row), ())
    sizes = ", ".join(f"{size / 1e6:.1f}" for size in buckets)
    learns = f"{_net(results)} learns random images"
    return [f"{learns}; DDP's buckets have {sizes} MB." if sizes else f"{learns}."]


def _net(results: Mapping[str, Result]) -> str:
    """Return the net's name. A record without a name is of a small net."""
    return str(results[_RUN].plan.get("net", "A net of 1.2 million parameters"))


def _gains(results: Mapping[str, Result], peer: str) -> dict[int, float]:
    """Return hbm's images a second over a peer's on the host, by the number of ranks; empty without
    figures of the peer."""
    return {
        row[HBM].of["ranks"]: images_a_second(row, HBM) / images_a_second(row, peer)
        for row in _rows(results)
        if {HBM, peer} <= set(row) and row[HBM].of["where"] == _HOST
    }


def _gains_of_peers(results: Mapping[str, Result]) -> dict[str, dict[int, float]]:
    """Return _gains() by peer. Raises Unmeasured without any figures."""
    gains = {peer: _gains(results, peer) for peer in _PEERS}
    if not any(gains.values()):
        raise Unmeasured(f"The record has no images a second of {' or '.join(_PEERS.values())}.")
    return gains


def _reason(results: Mapping[str, Result]) -> str:
    """Name the net, the samples and the peers without figures."""
    missing = [name for peer, name in _PEERS.items() if not _gains(results, peer)]
    unmeasured = f" {' and '.join(missing)}: not measured." if missing else ""
    return (
        f"{_net(results)} learns random images, and the peers are not the paper's;"
        f" {samples(results[_RUN].measurements)}.{unmeasured}"
    )


def _shares(results: Mapping[str, Result]) -> str:
    """Return the shares of communication on the host, in a sentence."""
    found = [row for row in _rows(results) if ALONE in row and row[ALONE].of["where"] == _HOST]
    named = []
    for name, words in _COMMUNICATING.items():
        shares = [communication(row, name) for row in found if name in row]
        if shares:
            named.append(f"{percent(min(shares))} to {percent(max(shares))} with {words}")
    return f" The share of communication in a step is {', '.join(named)}." if named else ""


def _against_mpi(results: Mapping[str, Result]) -> Outcome:
    gains = _gains_of_peers(results)
    compared = ", and ".join(
        f"by {change(min(these.values()))} to {change(max(these.values()))} compared with"
        f" {_PEERS[peer]}"
        for peer, these in gains.items()
        if these
    )
    best = {peer: max(these.values(), default=0.0) for peer, these in gains.items()}
    return Outcome(
        f"hbm changes the images a second {compared}.{_shares(results)}",
        graded(best[MPI] >= _CNTK, best[GLOO] >= _CNTK),
        _reason(results),
    )


def _over_processes(results: Mapping[str, Result]) -> Outcome:
    gains = {peer: these for peer, these in _gains_of_peers(results).items() if these}
    compared = ", and ".join(
        f"the gain over {_PEERS[peer]} is {change(these[min(these)])} with {min(these)} ranks and"
        f" {change(these[max(these)])} with {max(these)}"
        for peer, these in gains.items()
    )
    grown = {
        peer: these[max(these)] for peer, these in gains.items()
        if these[max(these)] > these[min(these)]
    }  # fmt: skip
    return Outcome(
        f"{compared[0].upper()}{compared[1:]}.",
        graded(grown.get(MPI, 0.0) >= _TENSORFLOW, bool(grown)),
        _reason(results),
    )


def _divided(results: Mapping[str, Result]) -> Outcome:
    rates = {
        (row[HBM].of["where"], row[HBM].of["ranks"]): images_a_second(row, HBM)
        for row in _rows(results)
        if HBM in row
    }
    ratio = Spread.of(
        [
            rate / rates[_HOST, ranks]
            for (where, ranks), rate in rates.items()
            if where != _HOST and (_HOST, ranks) in rates
        ],
        "containers and the host",
    )
    return Outcome(
        f"In containers, hbm learns {ratio.span} times the images of as many ranks on the host.",
        graded(ratio.least >= 1 / EQUAL, ratio.median >= 1 / EQUAL),
        "The keynote has no number for containers. Here they share memory on one machine.",
    )


_CLAIMS = (
    Claim(
        PANDA,
        "Slide on CNTK with MVAPICH2-X on CPUs",
        "With reductions in a shared address space (XPMEM), CNTK trains AlexNet on CPUs up to 20 %"
        " better than with Intel MPI (the slide does not state the measure).",
        _against_mpi,
        "It holds if the best gain in images a second over MPI in C is at least 20 %, and in part"
        " if the best gain over Gloo is.",
    ),
    Claim(
        PANDA,
        "Slide on TensorFlow with MVAPICH2-X on CPUs",
        "SALaR and reductions in a shared address space (XPMEM) give TensorFlow up to 15 % more"
        " images a second at 448 processes, and up to 35 % at 896 (AlexNet on CPUs).",
        _over_processes,
        "It holds if the gain over MPI in C grows with the ranks, to at least 35 %, and in part if"
        " the gain over MPI in C or Gloo grows.",
    ),
    Claim(
        PANDA,
        "Slides on MVAPICH2-Virt: containers",
        "MPI in containers performs well.",
        _divided,
        "It holds if containers are at most 10 % slower, and in part if in the median.",
    ),
)


IMAGES = Experiment(
    name=_RUN,
    figures="images a second, host and containers",
    label=Label.MEASURED,
    differs=(
        "Up to 8 ranks on two cores, with 8 random images each, replace ImageNet on clusters. If"
        " ranks outnumber the cores, further ranks add communication but no speed. The keynote"
        " compares MPI libraries; here hbm is compared with Gloo and with MPI in C (mpi-c)."
        " DistributedDataParallel has no such MPI, so the step of MPI in C is computed: the median"
        " step without communication, plus the median all_reduces of DDP's buckets in a program"
        " without Python. Its communication overlaps with no computation. If ranks outnumber the"
        " cores, MPI's ranks wait in busy loops and hbm's ranks sleep. The columns"
        ' "communication" have the share of a step that communication adds to the computation.'
    ),
    claims=_CLAIMS,
    runs=(Run(_RUN, "papers.images", [], ["--quick"]),),
    table=_table,
    panels=_panels,
    answer=_setting,
)
