"""Configuration of the API server: access, and limits on one request."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec

from minisgl.config.settings import ConfigError, Setting, Settings, seconds
from minisgl.limits import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_STRINGS, Limits

_ORIGIN = re.compile(r"\*|null|file://|[a-z][a-z0-9+.-]*://[^/\s*]+")  # as a browser's header Origin names it


class HttpConfig(Settings, frozen=True, kw_only=True):
    """The API server: access, and limits on one request."""

    api_keys: Annotated[
        tuple[str, ...],
        Setting(
            "keys of which clients must send one as bearer token; none: all routes are open; better in "
            "MINISGL_API_KEY or a file, because other users see flags",
            flags=("--api-key",),
            metavar="KEY",
        ),
    ] = ()
    admin_api_key: Annotated[
        str | None,
        Setting(
            "key that /flush_cache, /abort and their aliases need instead of --api-key; better in "
            "MINISGL_ADMIN_API_KEY; none: these need what all routes need",
            metavar="KEY",
        ),
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        Setting(
            "names of the server in clients' Host headers, besides localhost and addresses; *: any; none: any, unless "
            "--host is a loopback address",
            metavar="NAME",
        ),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Setting(
            "origins of web pages that may use the server (CORS); *: all; none: only the server's own", metavar="ORIGIN"
        ),
    ] = ()
    allowed_methods: Annotated[tuple[str, ...], Setting("methods that such pages may use", metavar="METHOD")] = ("*",)
    allowed_headers: Annotated[tuple[str, ...], Setting("headers that such pages may send", metavar="HEADER")] = ("*",)
    allow_credentials: Annotated[bool, Setting("let such pages send cookies")] = False
    root_path: Annotated[
        str,
        Setting(
            "prefix that a reverse proxy puts before every route", aliases=("--fastapi-root-path",), metavar="PATH"
        ),
    ] = ""
    ssl_keyfile: Annotated[str | None, Setting("private key, for https", metavar="FILE")] = None
    ssl_certfile: Annotated[str | None, Setting("certificate, for https", metavar="FILE")] = None
    max_body_bytes: Annotated[int, Setting("largest body of a request", metavar="BYTES", ge=1)] = 8 * 1024 * 1024
    ui: Annotated[bool, Setting("leave out the page at / and /debug/state", flags=("--disable-ui",))] = True
    response_store: Annotated[
        str | None,
        Setting("SQLite file that stores the responses of /v1/responses; none: they are not stored", metavar="FILE"),
    ] = None
    response_store_bytes: Annotated[
        int,
        Setting(
            "size of all stored responses, beyond which the oldest of the key that stores most are deleted",
            metavar="BYTES",
            ge=1,
        ),
    ] = 1024**3
    max_queued_requests: Annotated[
        int, Setting("most sequences (one for each choice) that run or wait; further requests get 503", ge=1)
    ] = 8192
    max_choices: Annotated[int, Setting("most choices of a prompt: n, best_of", ge=1)] = MAX_CHOICES
    max_stop_strings: Annotated[int, Setting("most stop strings of a request", ge=0, le=MAX_STOP_STRINGS)] = (
        MAX_STOP_STRINGS
    )
    max_logprobs: Annotated[
        int, Setting("most alternatives per token that a request may ask for", ge=0, le=MAX_LOGPROBS)
    ] = MAX_LOGPROBS
    receive_timeout: Annotated[float, seconds("time in which a request must arrive", gt=0)] = 60.0
    send_timeout: Annotated[float, seconds("time after which a client that accepts no data is disconnected", gt=0)] = (
        300.0
    )
    health_timeout: Annotated[
        float, seconds("time without a heartbeat through all processes after which /health fails", gt=0)
    ] = 60.0

    def limits(self, engine: Limits) -> Limits:
        """Return the engine's limits with those on one request."""
        return msgspec.structs.replace(
            engine, max_choices=self.max_choices, max_stop_strings=self.max_stop_strings, max_logprobs=self.max_logprobs
        )

    def validate(self) -> None:
        super().validate()
        admin_keys = () if self.admin_api_key is None else (self.admin_api_key,)
        for flag, keys in {"--api-key": self.api_keys, "--admin-api-key": admin_keys}.items():
            if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in keys):
                raise ConfigError(f"{flag}: a key must have at least one character, all of them visible ASCII")
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):  # browsers send none like it, so it would allow nothing
                raise ConfigError(f"--allowed-origins: {origin} must be *, null or of the form https://example.com")
        if "*" in self.allowed_origins and self.allow_credentials:
            raise ConfigError("--allow-credentials needs the --allowed-origins by name, not *")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path must begin with / and not end with it, not {self.root_path}")
        if self.response_store is not None and not Path(self.response_store).absolute().parent.is_dir():
            raise ConfigError(f"--response-store {self.response_store}: there is no such folder")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("--ssl-keyfile and --ssl-certfile must be given together")
        for flag, path in {"--ssl-keyfile": self.ssl_keyfile, "--ssl-certfile": self.ssl_certfile}.items():
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{flag} {path}: there is no such file")
        if self.ssl_keyfile is not None and self.ssl_certfile is not None:
            _check_certificate(self.ssl_keyfile, self.ssl_certfile)


def _check_certificate(keyfile: str, certfile: str) -> None:
    import ssl  # no other process needs it

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
    except OSError as error:
        raise ConfigError(f"--ssl-certfile {certfile} and its --ssl-keyfile cannot be used: {error}") from None
