"""Measures programs before and after the change that their profile suggests (docs/profile.md).

    python -m benchmarks.profile_cases --json profile_cases.json

Each case is a program of a library. The same processes make the program twice, before the change
and after it, and take a pair of samples again and again. Every second pair takes the sample after
the change first. A sample is the mean time of several training steps after an uncounted one, on the
slowest rank. Before the pairs, each of the two programs runs once in hbmcomm.profile(). The notes
of the result are the lines that `hbmcomm profile` then prints below "What to change first".

accelerate is in build/libraries, which `make test-libraries` makes. Run this program with
build/libraries/bin/python to measure the cases of accelerate.
"""

import importlib.util
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, repeat
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import RenderableType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, Sampler

import torch_hbmcomm
from benchmarks import pairs
from benchmarks.pairs import Pair
from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.ranks import launch, leave
from torch_hbmcomm.bench.report import Json, Ranks, check_file, fail, finish, names
from torch_hbmcomm.bench.result import Result, check_counts, check_names, describe_machine
from torch_hbmcomm.bench.rounds import timed
from torch_hbmcomm.profiling import clocks, costs
from torch_hbmcomm.profiling import ranks as profiles

BEFORE, AFTER = "before", "after"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Image = tuple[torch.Tensor, int]  # with its label


@dataclass(frozen=True)
class Case:
    """A program of a library, and a change of it."""

    about: str
    change: str
    package: str  # the program imports it
    step: Callable[[bool], Callable[[], None]]  # makes a training step; True: after the change


class Images(IterableDataset[Image]):
    """An endless stream of images, each of which is decoded when it is read.

    Has every `every`-th image from number `first` on.
    """

    def __init__(self, first: int, every: int) -> None:
        generator = torch.Generator().manual_seed(0)
        smooth = torch.rand(256, 3, 8, 8, generator=generator)
        pixels = nn.functional.interpolate(smooth, 64, mode="bilinear").mul(255).byte().numpy()
        self._files = [zlib.compress(one.tobytes()) for one in pixels]
        self._numbers = (first, every)

    def __iter__(self) -> Iterator[Image]:
        for number in count(*self._numbers):
            data = bytearray(zlib.decompress(self._files[number % len(self._files)]))
            pixels = torch.frombuffer(data, dtype=torch.uint8).view(3, 64, 64).float()
            normal = (pixels - pixels.mean((1, 2), keepdim=True)) / 64
            yield (normal.flip(2) if number % 2 else normal), number % 10


def _stream(changed: bool) -> Callable[[], None]:
    """Train on a stream with accelerate, whose rank 0 reads the batches of all ranks unless each
    rank has a stream of its own."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    rank, size = accelerator.process_index, accelerator.num_processes
    images = Images(rank, size) if changed else Images(0, 1)
    network = nn.Sequential(
        *(nn.Conv2d(3, 16, 5, 4), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
    )
    model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.01))
    loader = DataLoader(images, batch_size=32)
    batches = iter(loader if changed else accelerator.prepare(loader))

    def step() -> None:
        pixels, labels = next(batches)
        accelerator.backward(cross_entropy(model(pixels), labels))
        optimizer.step()
        optimizer.zero_grad()

    return step


class ByLength(Sampler[list[int]]):
    """Batches of two sequences of similar length. The next batch, which the next rank gets, mostly
    has sequences of that length too. The order is the same on all ranks."""

    def __init__(self, sequences: Sequence[torch.Tensor]) -> None:
        self._order = sorted(range(len(sequences)), key=lambda one: len(sequences[one]))
        self._generator = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self._order) // 2

    def __iter__(self) -> Iterator[list[int]]:
        runs = [self._order[first : first + 16] for first in range(0, len(self._order), 16)]
        for run in torch.randperm(len(runs), generator=self._generator).tolist():
            yield from (runs[run][first : first + 2] for first in range(0, 16, 2))


def _lengths(changed: bool) -> Callable[[], None]:
    """Train on sequences of uneven length with accelerate, which gives each rank a batch of its
    own in each step."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 256, (2048,), generator=generator).tolist()
    sequences = [torch.randn(length, 128, generator=generator) for length in lengths]
    network = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True)
    batching: dict[str, Any] = (
        {"batch_sampler": ByLength(sequences)} if changed else {"batch_size": 2, "shuffle": True}
    )
    pad = partial(pad_sequence, batch_first=True)
    loader: DataLoader[Any] = DataLoader(sequences, collate_fn=pad, **batching)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(
        network, torch.optim.SGD(network.parameters(), lr=0.01), loader
    )
    batches = chain.from_iterable(repeat(loader))

    def step() -> None:
        accelerator.backward(model(next(batches)).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step


def _shards(changed: bool) -> Callable[[], None]:
    """Train under FSDP2, whose buffers are ordinary tensors unless the group allocates them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(
        *(nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True) for _ in range(4))
    )
    for part in (*model, model):
        fully_shard(part, mesh=mesh)
    for part in model.modules() if changed else ():
        if isinstance(part, FSDPModule):
            part.set_allocate_memory_from_process_group_for_comm(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.randn(2, 32, 512)

    def step() -> None:
        model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


CASES: Mapping[str, Case] = {
    "stream": Case(
        "accelerate, an IterableDataset of compressed images, and a small convolutional network",
        "each rank reads its own images, and the loader is not prepared",
        "accelerate",
        _stream,
    ),
    "lengths": Case(
        "accelerate, DDP of a transformer layer, 2 sequences of 8 to 255 tokens on each rank",
        "a batch_sampler that groups sequences by length",
        "accelerate",
        _lengths,
    ),
    "fsdp2": Case(
        "PyTorch's fully_shard, 4 transformer layers (13 M parameters), 2 sequences of 32 tokens",
        "set_allocate_memory_from_process_group_for_comm(True)",
        "torch",
        _shards,
    ),
}


@dataclass(frozen=True)
class CasesPlan:
    """A choice of cases, and the number of pairs.

    Raises ValueError for a name that does not exist, or a count below its minimum.
    """

    cases: Sequence[str] = tuple(CASES)
    ranks: int = 2
    pairs: int = 20
    steps: int = 10  # in a sample

    def __post_init__(self) -> None:
        check_names("case", self.cases, CASES)
        check_counts(self, {"ranks": 2, "pairs": 7, "steps": 1})


def run(plan: CasesPlan) -> Result:
    """Measure. Raises RuntimeError when a rank fails."""
    found, notes, unavailable = [], [], {}
    for name in plan.cases:
        if importlib.util.find_spec(CASES[name].package) is None:
            unavailable[name] = (
                f"{CASES[name].package} is not installed: run make test-libraries, and then this "
                "program with build/libraries/bin/python"
            )
            continue
        with tempfile.TemporaryDirectory(prefix="hbmcomm-bench-") as folder:
            of_ranks: list[list[Pair]] = launch(
                plan.ranks, _measure, name, plan.pairs, plan.steps, folder
            )
            for state in (BEFORE, AFTER):
                notes += [f"{name}, {state}: {line}" for line in _advice(Path(folder, state))]
        found += pairs.measurements({"section": name}, (BEFORE, AFTER), pairs.slowest(of_ranks))
    return Result(
        benchmark="profile_cases",
        machine=describe_machine(),
        plan={"ranks": plan.ranks, "pairs": plan.pairs, "steps": plan.steps},
        sections={name: CASES[name].about for name in plan.cases},
        contenders={BEFORE: "", AFTER: "; ".join(f"{n}: {CASES[n].change}" for n in plan.cases)},
        unavailable=unavailable,
        notes=notes,
        measurements=found,
    )


def _measure(case: str, number: int, steps: int, folder: str) -> list[Pair]:
    """Return the pairs of a rank, and write its profiles."""
    torch.set_num_threads(1)
    dist.init_process_group("hbm")
    loops = {state: timed(CASES[case].step(state == AFTER)) for state in (BEFORE, AFTER)}
    for state, loop in loops.items():
        loop(1, 1)
        dist.barrier()
        with torch_hbmcomm.profile(Path(folder, state)):
            loop(1, steps)

    def sample(state: str) -> float:
        dist.barrier()
        return loops[state](1, steps)[0]

    found = pairs.take(lambda: sample(BEFORE), lambda: sample(AFTER), number)
    leave()
    return found


def _advice(folder: Path) -> list[str]:
    """Return the lines of the profile's page that name the things to change first."""
    loaded, _ = profiles.load(folder)
    advice = costs.advice(costs.costs(loaded, clocks.align(loaded)))
    return [f"{number}. {one.text}" for number, one in enumerate(advice, 1)]


def render(result: Result) -> RenderableType:
    """Return a table of the times and ratios."""
    title = f"Training steps before and after a change ({result.plan['pairs']} pairs)"
    table = pairs.table(title, "section", (BEFORE, AFTER), result.measurements)
    return report.group([table], result)


@app.command()
def main(
    cases: Annotated[str, typer.Option(help="Names separated by commas, or all.")] = "all",
    ranks: Ranks = 2,
    number: Annotated[int, typer.Option("--pairs", min=7, help="Pairs of each case.")] = 20,
    steps: Annotated[int, typer.Option(min=1, help="Training steps in a sample.")] = 10,
    json: Json = None,
) -> None:
    """Measure training steps before and after the change that the profile suggests.

    The exit status never depends on a time.
    """
    check_file(json)
    try:
        plan = CasesPlan(
            cases=list(CASES) if cases == "all" else names(cases),
            ranks=ranks,
            pairs=number,
            steps=steps,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        result = run(plan)
    except RuntimeError as error:
        fail(str(error))
    finish(render(result), result, json)


if __name__ == "__main__":
    app()
