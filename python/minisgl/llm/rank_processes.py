"""The processes of the other tensor-parallel ranks of an LLM: they execute the plans of the caller's rank 0."""

from __future__ import annotations

import os
import shutil
import weakref

import zmq

from minisgl.config import ConfigError, ServerConfig
from minisgl.limits import Limits
from minisgl.message.control import Failed, Ready, Serve, Start
from minisgl.message.socket import Addresses, Outbox
from minisgl.message.to_rank import ToRank
from minisgl.process.cpu_environment import cpu_environment
from minisgl.process.launch import Child, start_worker
from minisgl.process.run_dir import make_run_dir


class RankProcesses:
    """Ranks 1 and up. They end when `close` closes their control pipes, or with the caller."""

    def __init__(self, config: ServerConfig) -> None:
        self._run_dir = make_run_dir()
        self._remove_run_dir = weakref.finalize(self, shutil.rmtree, self._run_dir, ignore_errors=True)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.addresses = Addresses(self._run_dir)
        self._children: list[Child] = [
            start_worker(
                f"scheduler-{rank}",
                "minisgl.scheduler.process:run",
                Start(config, self._run_dir, rank),
                cpu_environment(os.environ),
            )
            for rank in range(1, config.engine.tp_size)
        ]

    def outboxes(self, limits: Limits) -> list[Outbox[ToRank]]:
        """Wait until all are ready and let them begin; where their plans go. ConfigError if one fails."""
        for child in self._children:
            while not isinstance(message := child.pipe.receive(), Ready):
                if message is None or isinstance(message, Failed):
                    reason = message.message if message else "it died"
                    self.close()
                    raise ConfigError(f"{child.name}: {reason}")
            child.pipe.send(Serve(limits))
        return [Outbox(self._context, self.addresses.rank(rank)) for rank, _ in enumerate(self._children, start=1)]

    def close(self) -> None:
        for child in self._children:
            child.pipe.close()
            child.process.kill()
            child.process.wait()
        self._context.destroy(linger=0)
        self._remove_run_dir()
