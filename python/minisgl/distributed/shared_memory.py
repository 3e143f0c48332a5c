"""Ranks on the CPUs of one host: values are in shared memory, and a byte on a socket signals that they are complete.

A rank has two slots in the memory. In a collective it writes its values to one slot, sends a byte to every other rank,
and reads the others' slots when it has received their bytes. The next collective uses the other slot. A rank writes to
the first slot again only after it has received everybody's byte of the collective between, which each rank sends when
it has finished reading the first. Waiting is a blocking read, so it takes no CPU time, orders the memory accesses, and
ends when a peer's process does. Gloo, which copies through sockets, takes a core 250 us and more for a sum of a few
rows.

Every rank sums in the order of the ranks, so the result has the same bits on all of them.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from minisgl.config import ConfigError
from minisgl.distributed.group import TPGroup, meet, side_by_side

_SLOT_BYTES = 1 << 20  # larger tensors are sent in pieces
_POLL = 0.02  # seconds to wait for a connection between calls of `check`


class RankGone(ConfigError, RuntimeError):
    """Another rank's process has ended, and has said why."""


class SharedMemoryTP(TPGroup):
    """One rank of the group. A collective raises RuntimeError if another rank does not come."""

    def __init__(self, rank: int, peers: Mapping[int, socket.socket], memory: mmap.mmap, timeout_s: float) -> None:
        self.rank = rank
        self.size = len(peers) + 1
        self._peers = dict(sorted(peers.items()))
        self._slots = torch.frombuffer(memory, dtype=torch.uint8).view(2, self.size, _SLOT_BYTES)
        self._turn = 0
        self._timeout_s = timeout_s
        for peer in self._peers.values():
            peer.setblocking(True)
            seconds = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)

    @classmethod
    def connect(
        cls,
        *,
        rank: int,
        size: int,
        init_method: str,
        timeout_s: float = 300.0,
        check: Callable[[], None] = lambda: None,
    ) -> SharedMemoryTP:
        """Return the group once all ranks have come (see `meet`). RuntimeError if one does not come in time.

        Sockets are created beside the file of `init_method`, so that nobody but its folder's owner has to remove those
        of a rank that is killed meanwhile.
        """
        path = f"{init_method.removeprefix('file://')}-{rank}"
        peers: dict[int, socket.socket] = {}
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen(size)
                listener.settimeout(_POLL)
                store = meet(rank, size, init_method, timeout_s, check, path)
                for other in range(rank):
                    peers[other] = socket.socket(socket.AF_UNIX)
                    peers[other].connect(store.get(f"rank {other}").decode())
                    peers[other].sendall(bytes([rank]))
                deadline = time.monotonic() + timeout_s
                while len(peers) < size - 1:
                    check()
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"of {size} ranks, {len(peers) + 1} have come in {timeout_s:.0f} s")
                    try:
                        peer, _ = listener.accept()
                    except TimeoutError:
                        continue
                    peers[peer.recv(1)[0]] = peer
        finally:
            Path(path).unlink(missing_ok=True)
        return cls(rank, peers, _map(rank, peers, 2 * size * _SLOT_BYTES), timeout_s)

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        x = x.contiguous()
        for piece in _pieces(x.view(-1)):
            first, *others = self._exchange(piece)
            total = first.to(torch.float32, copy=True)
            for other in others:
                total.add_(other)
            piece.copy_(total)
        return x if residual is None else x.add_(residual)

    def all_gather(self, x: Tensor, width: int | None = None, out: Tensor | None = None) -> Tensor:
        gathered = x.new_empty(self.size, x.numel())
        begin = 0
        for piece in _pieces(x.flatten()):
            end = begin + len(piece)
            for row, values in zip(gathered, self._exchange(piece), strict=True):
                row[begin:end] = values
            begin = end
        return side_by_side(gathered.view(self.size, *x.shape), width, out)

    def smallest(self, value: int) -> int:
        return min(int(one) for one in self._exchange(torch.tensor([value])))

    def check(self) -> None:
        pass  # collectives raise their errors themselves

    def abort(self) -> None:
        for peer in self._peers.values():
            try:
                peer.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is gone already
                continue

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()

    def _exchange(self, own: Tensor) -> list[Tensor]:
        """Return the ranks' tensors of the size of `own`, at most a slot. The call after the next overwrites them."""
        slots = self._slots[self._turn, :, : own.nbytes].view(own.dtype)
        self._turn ^= 1
        slots[self.rank] = own
        for rank, peer in self._peers.items():
            try:
                peer.send(b"\0")
            except OSError as error:
                raise RankGone(f"rank {rank} is gone: {error.strerror}") from error
        for rank, peer in self._peers.items():
            try:
                came = peer.recv(1)
            except BlockingIOError:
                raise RuntimeError(f"rank {rank} did not come to a collective in {self._timeout_s:.0f} s") from None
            except OSError as error:
                raise RankGone(f"rank {rank} is gone: {error.strerror}") from error
            if not came:
                raise RankGone(f"rank {rank} is gone")
        return list(slots)


def _pieces(flat: Tensor) -> Iterator[Tensor]:
    """Yield views of at most a slot's size."""
    length = _SLOT_BYTES // flat.itemsize
    for begin in range(0, len(flat), length):
        yield flat[begin : begin + length]


def _map(rank: int, peers: Mapping[int, socket.socket], size: int) -> mmap.mmap:
    """Return mapped memory that rank 0 creates and sends to the others. It has no name, so no file is left behind."""
    if rank == 0:
        file = os.memfd_create("minisgl-ranks")
        os.ftruncate(file, size)
        for peer in peers.values():
            socket.send_fds(peer, [b"\0"], [file])
    else:
        _, files, _, _ = socket.recv_fds(peers[0], 1, 1)
        if not files:
            raise RankGone("rank 0 is gone")
        (file,) = files
    try:
        return mmap.mmap(file, size)
    finally:
        os.close(file)
