"""A box, as a process of its own."""

from torch_hbmcomm import smb
from torch_hbmcomm.bench.peer import obey


class Box:
    def open(self, listen: str, memory: int, token: str, threads: int, store: str | None) -> str:
        """Its address."""
        self._server = smb.Server(
            listen=listen, memory=memory, token=token, accumulate_threads=threads, store=store
        )
        return self._server.url


if __name__ == "__main__":
    obey(Box())
