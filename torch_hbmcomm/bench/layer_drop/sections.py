"""The sections by name, in the order in which they are measured and shown."""

from __future__ import annotations

from torch_hbmcomm.bench.layer_drop.break_even import BREAK_EVEN
from torch_hbmcomm.bench.layer_drop.ddp import DDP
from torch_hbmcomm.bench.layer_drop.memory_pass import PASS
from torch_hbmcomm.bench.layer_drop.section import Section
from torch_hbmcomm.bench.layer_drop.server import SERVER
from torch_hbmcomm.bench.layer_drop.training import TRAINING

SECTIONS: dict[str, Section] = {
    section.name: section for section in (PASS, DDP, SERVER, TRAINING, BREAK_EVEN)
}
