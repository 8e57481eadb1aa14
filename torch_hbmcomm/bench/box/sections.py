"""All sections, in the order in which they are measured and shown."""

from torch_hbmcomm.bench.box.accumulate import ACCUMULATE
from torch_hbmcomm.bench.box.clients import CLIENTS
from torch_hbmcomm.bench.box.latency import LATENCY
from torch_hbmcomm.bench.box.link import LINK
from torch_hbmcomm.bench.box.rivals import RIVALS
from torch_hbmcomm.bench.box.section import Section
from torch_hbmcomm.bench.box.shm import SHM
from torch_hbmcomm.bench.box.store import STORE
from torch_hbmcomm.bench.box.tcp import TCP
from torch_hbmcomm.bench.box.verbs import VERBS

SECTIONS: dict[str, Section] = {
    section.name: section
    for section in (SHM, TCP, LINK, VERBS, ACCUMULATE, LATENCY, CLIENTS, RIVALS, STORE)
}
