"""Memory on each GPU of a group that all its ranks can read and write (torch's symmetric memory), and tests of it."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch._C._distributed_c10d import HashStore, _register_process_group, _unregister_process_group
from torch.distributed.distributed_c10d import GroupName

from minisgl.error_text import summary

_ALONE = GroupName("minisgl-alone")  # a group of one process


class SymmetricMemory:
    """Memory of a group's ranks, `size` bytes on each GPU, which all can write to. RuntimeError if torch cannot.

    `group` is a group or its name. The next rendezvous of all its ranks must have one number (`meet_alike`).
    """

    def __init__(self, group: dist.ProcessGroup | GroupName, device: torch.device, size: int) -> None:
        # Setting up a multicast object can hang on some hosts, and nothing here uses one.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        with torch.cuda.device(device):  # torch counts the uses of its memory pool on the current GPU
            self.words = symm_mem.empty(size // 4, dtype=torch.int32, device=device)
        self._handle = symm_mem.rendezvous(self.words, group)  # its end would unmap the peers' memory
        self.addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)

    def of(self, rank: int, count: int) -> Tensor:
        """Return the first words of a rank's memory, int32 [count]."""
        return self._handle.get_buffer(rank, (count,), torch.int32)


def meet_alike(device: torch.device, smallest: Callable[[int], int]) -> str | None:
    """Make torch give the next rendezvous of all ranks one number. None, or why it is impossible, at all ranks alike.

    torch counts the rendezvous of a process, not of a group (https://github.com/pytorch/pytorch/issues/196082), and
    ranks at different numbers wait for each other until the group's timeout. So if rank 0's process has had another
    `LLM`, its new processes first meet with themselves until they have its number.
    """
    number, why = _meet_alone(device)
    latest = -smallest(-number)
    while 0 <= number < latest:
        number, why = _meet_alone(device)
    if smallest(0 <= number == latest):
        return None
    return why or "another rank has no symmetric memory, or torch counts its rendezvous in another way"


def _meet_alone(device: torch.device) -> tuple[int, str | None]:
    """Return torch's number for a rendezvous of this process with itself, or -1 and why there is none."""
    store = HashStore()
    group = dist.ProcessGroup(store, 0, 1)
    _register_process_group(_ALONE, group)
    try:
        SymmetricMemory(_ALONE, device, 16)
        # torch exchanges values under keys such as CUDASymmetricMemory/5/0.
        return max((int(key.split("/")[1]) for key in store.list_keys()), default=0), None
    except Exception as error:  # whatever torch, the driver or the container makes of it
        return -1, f"no symmetric memory: {summary(error)}"
    finally:
        _unregister_process_group(_ALONE)


def reaches_all(memory: SymmetricMemory, rank: int, ranks: int, smallest: Callable[[int], int]) -> bool:
    """Write a word to each rank's memory, and return True if each memory has the words of all ranks."""
    for peer in range(ranks):
        memory.of(peer, ranks)[rank] = rank + 1
    smallest(1)
    wanted = list(range(1, ranks + 1))
    found = [(memory.of(peer, ranks) + 0).tolist() for peer in range(ranks)]  # read by a kernel
    smallest(1)
    return all(words == wanted for words in found)
