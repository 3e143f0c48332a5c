"""Starts the server, after checks that take little time: of the command line, the port and the config of the model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from minisgl.cli import parse_args
from minisgl.config import ConfigError
from minisgl.logs import configure_logging, set_up_logging
from minisgl.models.config.generation_config import load_sampling_defaults
from minisgl.models.download import ended_by_signals
from minisgl.models.load_config import load_engine_model
from minisgl.pooling.pooling_config import NO_TEXT
from minisgl.process.machine import open_standard_streams, raise_open_files, wait_for_children
from minisgl.server.api.tracing import check_otel
from minisgl.server.listener import bind, bind_unix
from minisgl.server.supervisor import Supervisor


def start(words: Sequence[str]) -> int:
    """Serve as the command line says until the server is ended.

    Returns the exit code: 0 after an interrupt (130 during these checks), 1 after a failure, 2 for an error that the
    user can correct.
    """
    try:
        open_standard_streams()
        wait_for_children()
        set_up_logging()
        config, find = parse_args(words)
        configure_logging(config.log_level, config.log_format)
        raise_open_files(config.http.max_queued_requests)
        if config.shell:
            from minisgl.shell.shell_process import check_packages

            check_packages()
        if config.otlp_endpoint is not None:
            check_otel()
        sockets: list[Path] = []
        if config.uds is None:
            listener = bind(config.host, config.port, config.http.send_timeout)
        else:
            listener = bind_unix(config.uds)
            sockets.append(Path(config.uds))
        with ended_by_signals(*sockets):
            folders = find()
        # An unsupported model is noticed before any process is started.
        model = load_engine_model(folders.model, config.engine)
        if config.shell and model.pooling is not None:
            raise ConfigError(f"--shell is for a chat, and {NO_TEXT}")
        config = msgspec.structs.replace(
            config.located(folders.model, folders.tokenizer),
            sampling_defaults=load_sampling_defaults(config.source.generation_config, folders.model),
            pooling=model.pooling,
        )
        supervisor = Supervisor(config, listener)
    except ConfigError as error:
        print(f"minisgl: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return supervisor.run()
