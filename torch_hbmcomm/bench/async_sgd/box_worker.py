"""A worker whose server is a box. It has a slot there, of the size of the weights."""

import numpy as np

from torch_hbmcomm import smb
from torch_hbmcomm.bench.async_sgd.box_exchanges import EXCHANGES
from torch_hbmcomm.bench.async_sgd.worker import Worker
from torch_hbmcomm.bench.peer import obey
from torch_hbmcomm.smb.box import Transport


class BoxWorker(Worker):
    def prepare(
        self,
        size: int,
        weight: int,
        way: str,
        transport: Transport,
        lanes: int,
        url: str,
        token: str,
        key: str,
    ) -> None:
        self._box = smb.connect(url, token, transport, lanes)
        shared = self._box.alloc(size, key=key, mode="attach")
        slot = self._box.alloc(size, mode="create", temporary=True)
        self._allocate(size // 4, weight)
        if way == "in place":
            view = np.frombuffer(slot.view(), np.float32)
            view[:] = self.gradients
            self.gradients = view
        self._exchange = EXCHANGES[way](shared, slot, self.gradients, self.weights)

    def exchange(self) -> None:
        self._exchange()

    def release(self) -> None:
        del self._exchange
        super().release()
        self._box.close()


if __name__ == "__main__":
    obey(BoxWorker())
