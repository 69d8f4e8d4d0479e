"""`python -m runtime.serve MODEL`: an HTTP server for OpenAI's clients.

Exit codes are those of `runtime.generate`, but for 0 after SIGTERM or SIGHUP: that is how a server is meant to end.
Asked to end (SIGINT, too), it lets running replies finish for a while first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import ipaddress
import logging
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engines.errors import DeviceLostError, ResourceError, UsageError
from engines.signals import Terminated
from runtime.command_line import (
    Parser,
    add_model_arguments,
    add_sampling_arguments,
    add_spec_arguments,
    read_api_key,
    run_command,
    sampling_params,
    say,
    session_of,
)
from runtime.session import Session

if TYPE_CHECKING:
    from runtime.server.service import ServiceOptions

_PACKAGES = ("fastapi", "llguidance", "prometheus_client", "uvicorn")
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
MIB = 1 << 20


def main(arguments: list[str] | None = None) -> int:
    options = server_parser("runtime.serve", "Serve a Qwen3.5-family model to OpenAI's clients.").parse_args(arguments)
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"the server needs {', '.join(missing)}; pip install 'nextn-trt[serve]'")
    check_options(options)
    api_key = key_of(options)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    listening = _bind(options.host, options.port)  # before a long export

    from runtime.server.app import create_app
    from runtime.server.connections import WAITING, ConnectionLimits, allowed, web_server
    from runtime.server.security import Limits
    from runtime.server.service import Service

    session = session_to_serve(options)
    service = Service(session, service_options(options))
    service.grammars.warm_up()
    limits = Limits(body_bytes=options.max_body * MIB, api_key=api_key, hosts=answered_hosts(options))
    app = create_app(service, limits)
    plan = getattr(session.trunk, "plan", None)
    if plan is not None:
        say(f"GPU memory: {plan}", to=sys.stderr)
    what = f"model {service.model}, drafting {session.spec_type} ({service.scheduler.num_slots} at once)"
    listening.listen(WAITING)  # who reads the next line may connect
    say(f"listening on {_address(listening)}, {what}", to=sys.stderr)
    connections = ConnectionLimits(count=allowed(options.max_connections))
    with contextlib.suppress(Terminated):  # raised once more when all is done
        server = web_server(
            app,
            connections,
            options.grace,
            over=lambda: service.scheduler.failed is not None,
            closing=lambda: service.close(options.grace),
        )
        server.run(sockets=[listening])
    if isinstance(service.scheduler.failed, DeviceLostError):
        raise service.scheduler.failed
    return 0


def session_to_serve(options: argparse.Namespace) -> Session:
    return session_of(options, options.sequences, options.cache_ram * MIB)


def service_options(options: argparse.Namespace) -> ServiceOptions:
    """What the flags of `server_parser` say of the service."""
    from runtime.server.service import ServiceOptions

    return ServiceOptions(
        # A seed drawn now would give every request the same noise.
        defaults=dataclasses.replace(sampling_params(options), seed=options.seed),
        alias=options.alias,
        num_sequences=options.sequences,
        queue_limit=options.queue,
        timeout_s=options.timeout or None,
        cache_bytes=options.cache_ram * MIB,
        log_prompts=options.log_prompts,
    )


def server_parser(module: str, description: str) -> argparse.ArgumentParser:
    """The flags of a server: model, drafting, defaults of sampling, and how it serves."""
    parser = Parser(prog=f"python -m {module}", description=description)
    add_model_arguments(parser)
    add_spec_arguments(parser)
    add_sampling_arguments(parser)
    parser.set_defaults(temp=1.0)  # OpenAI's
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8080, help="0: any free one, printed (default: %(default)s)")
    group.add_argument("--alias", default="", metavar="NAME", help="the model's name to clients (default: its file's)")
    group.add_argument(
        "--sequences",
        type=int,
        default=0,
        metavar="N",
        help="replies at once, each with its own state (default: 4, on a GPU what it has memory for)",
    )
    group.add_argument(
        "--queue", type=int, default=32, metavar="N", help="requests that may wait; more get 503 (default: %(default)s)"
    )
    group.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds for a request; 0: any (default: %(default)s)"
    )
    group.add_argument(
        "--cache-ram", type=int, default=1024, metavar="MIB", help="for state of earlier prompts (default: %(default)s)"
    )
    group.add_argument("--max-body", type=int, default=16, metavar="MIB", help="largest request (default: %(default)s)")
    group.add_argument(
        "--max-connections", type=int, default=1024, metavar="N", help="of clients; more get 503 (default: %(default)s)"
    )
    group.add_argument(
        "--grace",
        type=int,
        default=30,
        metavar="S",
        help="seconds for running replies at the end (default: %(default)s)",
    )
    key = group.add_mutually_exclusive_group()
    key.add_argument("--api-key", default="", metavar="KEY", help="clients must give it; seen in the list of processes")
    key.add_argument("--api-key-file", type=Path, metavar="FILE", help="the key, in a file")
    group.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="answer this Host header, too; any host is answered unless --host is a loopback address",
    )
    group.add_argument("--log-prompts", action="store_true", help="write prompts to the log (default: never)")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raises UsageError for numbers out of their range."""
    sampling_params(options)  # for its checks
    bounds = {
        "port": (0, 65535),
        "sequences": (0, 256),
        "queue": (0, 10**6),
        "cache_ram": (0, 1 << 24),
        "max_body": (1, 1 << 12),
        "max_connections": (1, 1 << 20),
    }
    for name, (least, most) in bounds.items():
        if not least <= getattr(options, name) <= most:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(options, name)}: wanted {least} to {most}")
    if not 0 <= options.timeout < 1e9 or not 0 <= options.grace < 10**6:
        raise UsageError("--timeout and --grace are seconds, 0 or more")


def key_of(options: argparse.Namespace) -> str:
    return str(options.api_key) if options.api_key_file is None else read_api_key(options.api_key_file)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise ResourceError(f"cannot listen on {host} port {port} ({error.strerror or error})") from None
    except UnicodeError as error:  # no name that could be looked up
        raise UsageError(f"--host {host}: is no name of a host ({error})") from None
    return listening


def answered_hosts(options: argparse.Namespace) -> list[str]:
    """Host names that are answered. On a loopback address no others: a web page could have its name resolve there."""
    try:
        loopback = options.host == "localhost" or ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        loopback = False
    return [*_LOOPBACK_HOSTS, options.host, *options.allow_host] if loopback else list(options.allow_host)


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


if __name__ == "__main__":
    run_command(main)
