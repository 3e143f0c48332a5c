"""`python -m minisgl`: starts the server and stays until it is ended. See `--help`.

`python -m minisgl verify MODEL` compares a model with transformers instead; `python -m minisgl doctor` (or `--check`)
reports what works on this machine.
"""

from __future__ import annotations

import sys

import msgspec

from minisgl.cli import parse_args
from minisgl.config import ConfigError
from minisgl.logs import configure_logging, set_up_logging
from minisgl.models.config.generation_config import load_sampling_defaults
from minisgl.models.load_config import load_engine_model
from minisgl.pooling.pooling_config import NO_TEXT
from minisgl.process.machine import open_standard_streams, raise_open_files, wait_for_children
from minisgl.server.api.tracing import check_otel
from minisgl.server.listener import bind, bind_unix
from minisgl.server.supervisor import Supervisor


def main() -> int:
    """Return the exit code: 0 after an interrupt, 1 after a failure, 2 for an error that the user can correct."""
    if sys.argv[1:2] == ["verify"]:
        from minisgl.verify.__main__ import main as verify

        return verify(sys.argv[2:])
    if sys.argv[1:2] in (["doctor"], ["--check"]):
        from minisgl.doctor.__main__ import main as doctor

        return doctor(sys.argv[2:])
    open_standard_streams()
    wait_for_children()
    set_up_logging()
    try:
        config, find = parse_args(sys.argv[1:])
        configure_logging(config.log_level, config.log_format)
        raise_open_files(config.http.max_queued_requests)
        if config.shell:
            from minisgl.shell.shell_process import check_packages

            check_packages()
        if config.otlp_endpoint is not None:
            check_otel()
        if config.uds is None:
            listener = bind(config.host, config.port, config.http.send_timeout)
        else:
            listener = bind_unix(config.uds)
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


if __name__ == "__main__":
    sys.exit(main())
