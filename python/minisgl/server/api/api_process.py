"""The API server process: an inbox, an outbox to each tokenizer worker, and uvicorn on the supervisor's socket."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
from itertools import islice

import uvloop
import zmq

from minisgl.message.control import Shutdown
from minisgl.message.socket import Inbox, Outbox
from minisgl.message.to_api import ToApi
from minisgl.message.to_tokenizer import ToTokenizer
from minisgl.process.worker import Worker
from minisgl.server.api.app import build_app
from minisgl.server.api.http.drain import DrainState
from minisgl.server.api.http.errors import shutting_down
from minisgl.server.api.http.server import Server
from minisgl.server.api.requests.engine_client import EngineClient, Heartbeat
from minisgl.server.api.responses.store import open_store
from minisgl.server.api.routes.service import Service
from minisgl.server.api.tracing import Tracer
from minisgl.tokenizer.tokenizer_config import model_parsers

MESSAGES_A_TURN = 32  # taken from the inbox before requests get their turn
# Thresholds of the garbage collector. Each step makes thousands of objects, which reference counts free, and no cycles.
# Every second collection visits those that survived one. By default every tenth does: after twenty large bodies all
# streams waited for a fifth of a second.
COLLECT_AFTER = (50_000, 1, 100)


def run(worker: Worker) -> None:
    """Serve until told to shut down."""
    if worker.listen_fd is None:
        raise RuntimeError("the API server needs a listening socket")
    sock = socket.socket(fileno=worker.listen_fd)
    if sock.family != socket.AF_UNIX:
        # Connections inherit it. Without it a small write waits 40 ms for the client to acknowledge the one before.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    gc.set_threshold(*COLLECT_AFTER)
    uvloop.run(serve(worker, sock))
    os._exit(0)  # nothing is left to do, and ZeroMQ would wait for tokenizers that are gone


async def serve(worker: Worker, sock: socket.socket) -> None:
    """Set everything up, report ready, and serve."""
    config = worker.config
    with worker.phase("starting the API server"):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        inbox = Inbox[ToApi](context, worker.addresses.api, ToApi)
        outboxes = [
            Outbox[ToTokenizer](context, worker.addresses.tokenizer(index)) for index in range(config.num_tokenizers)
        ]
        tracer = None if config.otlp_endpoint is None else Tracer(config.otlp_endpoint, config.model_name)
        client = EngineClient(outboxes, config.http.max_queued_requests, tracer)
        parsers = model_parsers(config)
        responses = open_store(config.http)
    loop = asyncio.get_running_loop()
    drain = DrainState()
    worker.on_drain(lambda: loop.call_soon_threadsafe(drain.begin))
    limits = config.http.limits(worker.ready())
    service = Service(client, Heartbeat(client), config, limits, parsers, responses)
    server = Server(build_app(service, drain), config.http, drain, client.metrics)

    gc.collect()
    gc.freeze()  # startup objects stay: each full collection of them took 40 ms, in which all streams wait
    end_on_shutdown(worker, client, server)
    draining = asyncio.create_task(server.drain(worker.drained))
    receiving = asyncio.create_task(receive_forever(inbox, client))
    beating = asyncio.create_task(service.heartbeat.beat_forever())
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    ended, _ = await asyncio.wait({receiving, beating, serving}, return_when=asyncio.FIRST_COMPLETED)
    for task in ended - {serving}:
        # Reported while the event loop still runs: the supervisor then has it answer the clients and end. A loop that
        # is closed instead cuts them off, and cannot be closed at all if there is no memory left.
        worker.failed(f"{type(task.exception()).__name__}: {task.exception()}")
        await serving
    draining.cancel()
    if tracer is not None:
        await asyncio.to_thread(tracer.close)
    for task in ended:
        task.result()  # raises the error of a failed task: a process without its receiver could not answer


def end_on_shutdown(worker: Worker, client: EngineClient, server: Server) -> None:
    """Answer every open request with an error and end, when the supervisor says so."""
    loop = asyncio.get_running_loop()

    def shut_down(reason: str | None) -> None:
        client.shut_down(reason)
        server.end(shutting_down(reason))

    def on_shutdown(shutdown: Shutdown) -> None:
        """Run on the control thread, which ends the process after the grace whatever the event loop does."""
        loop.call_soon_threadsafe(shut_down, shutdown.error)
        time.sleep(shutdown.grace)
        os._exit(0)

    worker.on_shutdown(on_shutdown)


async def receive_forever(inbox: Inbox[ToApi], client: EngineClient) -> None:
    """Hand messages to the client as they come."""
    arrived = asyncio.Event()
    asyncio.get_running_loop().add_reader(inbox.fileno(), arrived.set)
    while True:
        arrived.clear()  # before draining: what comes meanwhile sets it again
        while messages := list(islice(inbox.drain(), MESSAGES_A_TURN)):
            client.dispatch(messages)
            await asyncio.sleep(0)
        await arrived.wait()
