"""Layer dropping with a parameter server: Lee et al. 2020, Table 1 and Figs. 5 to 14."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from benchmarks.markdown import Table
from benchmarks.panels import Panel
from papers.layer_drop.plot import panels as panels_of_dropping
from papers.layer_drop.server import EVERYTHING
from papers.report.experiment import Experiment, Label, Run
from papers.report.verdicts import (
    EQUAL,
    LEE,
    Claim,
    Outcome,
    Unmeasured,
    change,
    graded,
    percent,
    samples,
)
from torch_hbmcomm.bench.result import Measurement, Result

_RUN = "layer-drop"
_TRAINING = "layer-drop-training"
_RATIOS = (0.9, 0.95, 0.99)
_ALL = "all is sent"
_DROPPED = f"R = {_RATIOS[1]}"
_LIMITED, _UNLIMITED = "1 Gbit/s", "unlimited"
_WORKER, _SERVER = 1.055, 1.255  # the paper's computation with dropping over that without
_POINTS = 0.5  # of accuracy: a training that ends at most 0.5 points lower counts as equal
SOONER = 3.55  # the least that rounds to 3.6, which is 50,000 s over 14,000 s
_RULE = ", the paper's rule"  # ends the names of some contenders
_WAYS = ("LayerDrop's defaults", "the paper's rule")  # in the order of the record
_OF_TRAINING = "a small net learns MNIST with one seed."


def _table(results: Mapping[str, Result]) -> Table:
    rows = [
        [
            str(one.of["case"]),
            one.contender,
            _share(one.values.get("time_share")),
            _share(_iteration(one, results[_RUN].measurements)),
            _share(one.values.get("bytes_share")),
        ]
        for one in results[_RUN].measurements
    ]
    return Table(["network", "who", "time of communication", "an iteration", "bytes"], rows)


def _iteration(one: Measurement, measured: Iterable[Measurement]) -> float | None:
    """Return the share of an iteration. The record has only the milliseconds of the paper."""
    if not one.contender.startswith("paper"):
        return one.values.get("iteration_share")
    plain = next(
        other.values["iteration_ms"]
        for other in measured
        if other.of["case"] == one.of["case"] and other.contender.startswith("paper")
    )
    return one.values["iteration_ms"] / plain


def _share(value: float | None) -> str:
    """Return the change of a time, as in "-82.0%", from its share of the time without dropping.

    Returns a dash if the share is negative: in short runs on a busy machine, the computation that
    is subtracted from an iteration may exceed it.
    """
    return "-" if value is None or value < 0 else f"{value - 1:+.1%}"


def _trained(results: Mapping[str, Result]) -> list[Measurement]:
    """Return the contenders of all runs; plain training only once for each case."""
    found: dict[tuple[str, str], Measurement] = {}
    for result in results.values():
        for one in result.measurements:
            found.setdefault((one.of["case"], one.contender), one)
    return sorted(found.values(), key=lambda one: str(one.of["case"]))


def _training(results: Mapping[str, Result]) -> Table:
    rows = []
    for one in _trained(results):
        values = one.values
        sooner = values.get("sooner")
        rows.append(
            [str(one.of["case"]), one.contender]
            + [f"{values[name]:.1%}" for name in ("bytes_share", "iteration_share")]
            + [f"{values['loss']:.3f}", f"{values['accuracy']:.2f}", f"{values['points']:+.2f}"]
            + [f"{values['seconds']:.1f}", "never" if sooner is None else f"{sooner:.2f}"]
        )
    heading = [
        "case",
        "who",
        "bytes",
        "iteration",
        "loss",
        "accuracy, %",
        "points compared with all sent",
    ]
    heading += ["seconds", "speed-up until 0.5 points below the final accuracy of all sent"]
    return Table(heading, rows)


def _panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    return panels_of_dropping(results[_RUN])[0]


def _training_panels(results: Mapping[str, Result]) -> Sequence[Panel]:
    first = next(iter(results.values()))
    return panels_of_dropping(replace(first, measurements=_trained(results)))[0]


def _shares(results: Mapping[str, Result], case: str, name: str) -> dict[str, float]:
    """Return a value of each contender that drops layers, in a case of the first experiment.

    Raises Unmeasured without the contender _DROPPED.
    """
    found = {
        one.contender: one.values[name]
        for one in results[_RUN].measurements
        if one.of["case"] == case and one.contender.startswith("R = ") and name in one.values
    }
    if _DROPPED not in found:
        raise Unmeasured(f"The record has no {_DROPPED} over {case}.")
    return found


def _saved(case: str, name: str, theirs: float) -> Callable[[Mapping[str, Result]], Outcome]:
    """Return the function that compares a share of a time with the paper's share (`theirs`)."""
    limit = "" if name == "time_share" else "Gradients here need almost no computation. "
    limit += "There are 4 workers instead of 8. " if case == _UNLIMITED else ""
    time = {"time_share": "the time of communication", "iteration_share": "an iteration"}[name]
    link = {_LIMITED: f"over {_LIMITED}", _UNLIMITED: "over a link without a limit"}[case]

    def outcome(results: Mapping[str, Result]) -> Outcome:
        shares = _shares(results, case, name)
        enough = [who for who, share in shares.items() if 0 <= share <= theirs]
        which = f"{enough[0]} is the smallest measured R that saves" if enough else "No R saves"
        measured = (one for one in results[_RUN].measurements if one.of["case"] == case)
        return Outcome(
            f"{_DROPPED} changes {time} by {change(shares[_DROPPED])} {link}. {which} as much as"
            " the paper.",
            graded(bool(enough), shares[_DROPPED] <= theirs * EQUAL),
            f"{limit}The paper does not state R, and the section {_TRAINING} has the accuracy with"
            f" R = {', '.join(map(str, _RATIOS))}; {samples(measured, 'mean')}.",
        )

    return outcome


def _computation(results: Mapping[str, Result]) -> Outcome:
    times = {
        one.contender: one.values
        for one in results[_RUN].measurements
        if one.of["case"] == _LIMITED and "worker_ms" in one.values
    }
    if not {_ALL, _DROPPED} <= set(times):
        raise Unmeasured(f"The record has no computation with {_DROPPED}.")
    worker, server = (
        times[_DROPPED][name] / times[_ALL][name] for name in ("worker_ms", "server_ms")
    )
    return Outcome(
        f"{_DROPPED} changes the worker's computation by {change(worker)}, and the server's by"
        f" {change(server)}.",
        graded(False, worker <= _WORKER or server <= _SERVER),
        "A worker here computes no gradients, so handling all layers is most of its work, and its"
        " time is not the paper's. The server sums only layers that arrive.",
    )


def _less(results: Mapping[str, Result]) -> Outcome:
    shares = {
        case: [_shares(results, case, name) for name in ("bytes_share", "time_share")]
        for case in (_LIMITED, _UNLIMITED)
    }
    falls = [all(_falls(one.values()) for one in found) for found in shares.values()]
    data, time = (one[_DROPPED] for one in shares[_LIMITED])
    return Outcome(
        f"{_DROPPED} changes the bytes by {change(data)} over {_LIMITED}, and the time of"
        f" communication by {change(time)}.",
        graded(all(falls), any(falls)),
        "A counter of the link counts the bytes. A difference of times that is less than nothing is"
        " noise, and shows no fall.",
    )


def _falls(shares: Iterable[float]) -> bool:
    """Return True if the first share is below 1, and each further share below the one before."""
    return all(0 <= after < before for before, after in pairwise((1.0, *shares)))


def _workers(results: Mapping[str, Result]) -> Outcome:
    times = {link: _by_workers(results, link) for link in (_LIMITED, _UNLIMITED)}
    rises = [_rises(one.values()) for one in times.values()]
    shown = "; ".join(
        f"{', '.join(f'{time:.0f} ms with {count}' for count, time in found.items())} ({link})"
        for link, found in times.items()
    )
    return Outcome(
        f"Communication takes {shown}.",
        graded(all(rises), any(rises)),
        "Everything is sent. The workers share one end of the link, and two cores. A time that is"
        " less than nothing is noise, and shows no rise.",
    )


def _by_workers(results: Mapping[str, Result], link: str) -> dict[str, float]:
    """Return the milliseconds of communication over a link, by the number of workers.

    Raises Unmeasured without several numbers of workers.
    """
    found = {
        one.contender: one.values["communication_ms"]
        for one in results[_RUN].measurements
        if one.of["case"] == link + EVERYTHING
    }
    if len(found) < 2:
        raise Unmeasured(f"The record has no 2 and 8 workers over {link}.")
    return found


def _rises(times: Iterable[float]) -> bool:
    """Return True if each time is more than 1.1 times the one before, and none is below nothing."""
    return all(0 < before * EQUAL < after for before, after in pairwise(times))


_SAVED_RULE = (
    "It holds if some R changes the time as much as in the paper, and in part if R = 0.95 leaves at"
    " most 1.1 times the paper's share."
)
_TABLE_CLAIMS = (
    Claim(
        LEE,
        "Table 1, Fig. 9: communication at 1 Gbit/s",
        "With 4 workers, dropping reduces communication from 3.457 to 0.182 s (-95 %).",
        _saved(_LIMITED, "time_share", 0.182 / 3.457),
        _SAVED_RULE,
    ),
    Claim(
        LEE,
        "Table 1, Fig. 9: an iteration at 1 Gbit/s",
        "With 4 workers, an iteration takes 0.675 instead of 3.918 s (-83 %; the text has -82 and"
        " -85 %).",
        _saved(_LIMITED, "iteration_share", 0.675 / 3.918),
        _SAVED_RULE,
    ),
    Claim(
        LEE,
        "Table 1, Figs. 9 and 14: computation",
        "Dropping adds little computation: 4 to 5 % for a worker, and 16 to 25 % for the server"
        " (the text has 15 and 23 %).",
        _computation,
        "It holds in part if R = 0.95 adds at most 5 % for a worker or 25 % for the server. It"
        " cannot hold in full, because workers here compute no gradients.",
    ),
    Claim(
        LEE,
        "Table 1, Fig. 14; abstract: communication at 56 Gbit/s",
        "With 8 workers, dropping reduces communication from 1.951 to 0.375 s (-81 %).",
        _saved(_UNLIMITED, "time_share", 0.375 / 1.951),
        _SAVED_RULE,
    ),
    Claim(
        LEE,
        "Table 1, Fig. 14; abstract: an iteration at 56 Gbit/s",
        "With 8 workers, an iteration takes 0.665 instead of 2.222 s (-70 %).",
        _saved(_UNLIMITED, "iteration_share", 0.665 / 2.222),
        _SAVED_RULE,
    ),
    Claim(
        LEE,
        "Fig. 3",
        "Dropped layers make the data smaller, so communication takes less time.",
        _less,
        "It holds if bytes and time fall with every larger R over both links, and in part if they"
        " do over one.",
    ),
    Claim(
        LEE,
        "Fig. 1",
        "Communication with a parameter server takes longer if there are more workers.",
        _workers,
        "It holds if each larger number of workers takes more than 1.1 times as long over both"
        " links, and in part if so over one.",
    ),
)


def _runs_of(results: Mapping[str, Result], link: str) -> list[Measurement]:
    """Return the trainings that drop layers over a link. Raises Unmeasured without any."""
    found = [
        one
        for one in _trained(results)
        if str(one.of["case"]).startswith(link) and one.contender != _ALL
    ]
    if not found:
        raise Unmeasured(f"The records have no training over {link}.")
    return found


def _end(results: Mapping[str, Result]) -> Outcome:
    found = _runs_of(results, _LIMITED)
    plain = {one.of["case"]: one.curves["accuracy"] for one in _trained(results)
             if one.contender == _ALL}  # fmt: skip
    equal = [one for one in found if one.values["points"] >= -_POINTS]
    # The points have equal distances, and the last one is at the end.
    early = max(len(found[0].curves["accuracy"]) // 4 - 1, 0)
    behind = [
        one
        for one in found
        if one.curves["accuracy"][early] < plain[one.of["case"]][early] - _POINTS
    ]
    bytes_left = min((one.values["bytes_share"] for one in equal), default=1.0)
    return Outcome(
        f"{len(behind)} of {len(found)} trainings are behind after a quarter of the steps, and"
        f" {len(equal)} end at most {_POINTS} points below all sent, one of them with only"
        f" {percent(bytes_left)} of the bytes.",
        graded(len(equal) == len(behind) == len(found), any(one in behind for one in equal)),
        "The verdict is on accuracy; the section's table has the loss. The paper states neither R"
        f" nor the optimizer; {_OF_TRAINING}",
    )


def _sooner(results: Mapping[str, Result]) -> Outcome:
    found = _runs_of(results, _LIMITED)
    times = [one.values["sooner"] for one in found if "sooner" in one.values]
    best = max(times, default=0.0)
    return Outcome(
        f"{sum(one > 1 for one in times)} of {len(found)} trainings take less time than all sent to"
        f" its final accuracy (less {_POINTS} points); the best is {best:.2f} times as fast.",
        graded(best >= SOONER, best > EQUAL),
        f"Communication is a smaller part of an iteration than in the paper (88 %); {_OF_TRAINING}",
    )


def _worse(results: Mapping[str, Result]) -> Outcome:
    found = _runs_of(results, _UNLIMITED)
    points = [one.values["points"] for one in found]
    shown = " and ".join(
        f"{one.values['points']:+.2f} points with {way} (loss {one.values['loss']:.3f})"
        for one, way in zip(found, _WAYS, strict=True)
    )
    return Outcome(
        f"Compared with all sent, accuracy after all steps is {shown}.",
        graded(max(points) < -_POINTS, min(points) < -_POINTS),
        "The verdict is on accuracy; the section's table has the loss of all sent. The link has no"
        f" limit, and R is 0.95; {_OF_TRAINING}",
    )


def _over_time(results: Mapping[str, Result]) -> Outcome:
    found = _runs_of(results, _UNLIMITED)
    times = [one.values.get("sooner", 0.0) for one in found]
    shown = " and ".join(
        f"reached {one:.2f} times as fast with {way}" if one else f"never reached with {way}"
        for one, way in zip(times, _WAYS, strict=True)
    )
    return Outcome(
        f"The final accuracy of all sent (less {_POINTS} points) is {shown}.",
        graded(min(times) > EQUAL, max(times) > EQUAL),
        f"On one machine an unlimited link leaves little communication to save; {_OF_TRAINING}",
    )


def _by_ratio(results: Mapping[str, Result]) -> Outcome:
    found = {(one.of["case"], one.contender): one.values for one in _runs_of(results, _LIMITED)}
    few, many = f"R = {_RATIOS[0]}", f"R = {_RATIOS[-1]}"
    pairs = [
        (values, found[case, who.replace(few, many)])
        for (case, who), values in found.items()
        if who in (few, few + _RULE) and (case, who.replace(few, many)) in found
    ]
    if not pairs:
        raise Unmeasured(f"The records have no training with {few} and {many}.")
    less = sum(more["bytes_share"] < fewer["bytes_share"] for fewer, more in pairs)
    lost = [fewer["points"] - more["points"] for fewer, more in pairs]
    worse = sum(one > _POINTS for one in lost)
    return Outcome(
        f"{many} sends fewer bytes than {few} in {less} of {len(pairs)} pairs of trainings. In"
        f" {worse} of them it ends more than {_POINTS} points lower, at most {max(lost):.1f}.",
        graded(less == len(pairs) and worse > 0, less > 0 or worse > 0),
        f"The link has {_LIMITED}; {_OF_TRAINING}",
    )


_TRAINING_CLAIMS = (
    Claim(
        LEE,
        "Figs. 5 and 6",
        "At 1 Gbit/s, loss and accuracy are worse until about 14,000 steps, and equal in the end.",
        _end,
        f"It holds if all trainings are more than {_POINTS} points behind after a quarter of the"
        f" steps and end at most {_POINTS} points lower, and in part if some do both.",
    ),
    Claim(
        LEE,
        "Figs. 7 and 8",
        "At 1 Gbit/s, training converges in about 14,000 s instead of 50,000 s, 3.6 times as fast.",
        _sooner,
        "It holds if the best training is 3.6 times as fast as all sent, and in part if more than"
        " 1.1 times.",
    ),
    Claim(
        LEE,
        "Figs. 10 and 11",
        "At 56 Gbit/s, loss is higher and accuracy lower at equal epochs.",
        _worse,
        f"It holds if both trainings are more than {_POINTS} points lower, and in part if one is.",
    ),
    Claim(
        LEE,
        "Figs. 12 and 13",
        "At 56 Gbit/s, loss falls and accuracy rises faster over time, until accuracy is similar.",
        _over_time,
        "It holds if both trainings are more than 1.1 times as fast as all sent, and in part if one"
        " is.",
    ),
    Claim(
        LEE,
        "Section 5: R",
        "A larger R sends less, and may lower the accuracy.",
        _by_ratio,
        f"It holds if all pairs send less with the larger R and some end more than {_POINTS} points"
        " lower, and in part if one of these is so.",
    ),
)


TABLE_1 = Experiment(
    name=_RUN,
    figures="Table 1, Figs. 1, 3, 9 and 14",
    label=Label.EMULATED,
    differs=(
        "Hosts are network namespaces joined by a link. The link has 1 Gbit/s, or no limit where"
        " the paper has 56 Gbit/s. With dropping there are always 4 workers; the paper has 8 at 56"
        " Gbit/s. Rows with 2 and 8 workers are compared with 4 workers. All run on two cores"
        " instead of GPUs. LayerDrop has its defaults, not the paper's rule. Gradients have"
        " ResNet-50's sizes and need almost no computation; an iteration of the paper has 0.3 to"
        " 0.5 s of computation. Communication is"
        " the time of an iteration minus the time of an iteration on one host. If this"
        " difference is less than nothing, it is within the noise, and the table has a dash. The"
        " next section has the accuracy."
    ),
    claims=_TABLE_CLAIMS,
    runs=(Run(_RUN, "papers.layer_drop", ["--sections=server"], ["--sections=server", "--quick"]),),
    table=_table,
    panels=_panels,
)


def _training_runs() -> Iterator[Run]:
    """Yield a run of some minutes for each line of the table. Each also trains with all sent."""
    limited = [(name, "1000", ratio) for name in ("SGD", "momentum") for ratio in _RATIOS]
    for optimizer, megabits, ratio in [*limited, ("momentum", "unlimited", _RATIOS[1])]:
        name = f"{optimizer.lower()}-{ratio}" if megabits == "1000" else megabits
        terms = ["--sections=server-training", f"--optimizers={optimizer}"]
        terms += [f"--megabits={megabits}", f"--ratios={ratio}"]
        yield Run(
            f"{_TRAINING}-{name}",
            "papers.layer_drop",
            [*terms, "--seeds=1"],
            [*terms, "--quick", "--training-steps=2"],
        )


TRAINING = Experiment(
    name=_TRAINING,
    figures="Figs. 5 to 8 and 10 to 13",
    label=Label.EMULATED,
    differs=(
        "A convolutional net of 542,000 parameters learns 5,000 images of MNIST for 400 steps,"
        " instead of ResNet-50 (on ImageNet at 56 Gbit/s). A server and 4 workers run on two cores,"
        " with a link between two network namespaces. The link has 1 Gbit/s, or no limit where the"
        ' paper has 56 Gbit/s and 8 workers. Rows "R = ..." have LayerDrop\'s defaults. The'
        " paper's rule keeps its threshold between two searches, drops small layers too, and lets"
        " layers wait without a limit. Three of the net's layers have 27 % of its parameters each,"
        " so the paper's threshold is the same at R = 0.9 and 0.95. The paper's accuracy is on"
        " training images, ours is on test images. Each run also trains with everything sent, and"
        " its R is compared with that training. The table shows the first of these trainings."
    ),
    claims=_TRAINING_CLAIMS,
    runs=tuple(_training_runs()),
    table=_training,
    panels=_training_panels,
)
