"""The sections by name, in the order in which they are measured and shown."""

from torch_hbmcomm.bench.async_sgd.accuracy import ACCURACY
from torch_hbmcomm.bench.async_sgd.link import LINK
from torch_hbmcomm.bench.async_sgd.node import NODE
from torch_hbmcomm.bench.async_sgd.section import Section
from torch_hbmcomm.bench.async_sgd.straggler import STRAGGLER

SECTIONS: dict[str, Section] = {
    section.name: section for section in (NODE, LINK, STRAGGLER, ACCURACY)
}
