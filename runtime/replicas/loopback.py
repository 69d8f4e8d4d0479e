"""Ray's own servers on this machine alone."""

from __future__ import annotations

import ipaddress
import logging
from typing import Any

import ray.util
from ray.serve._private import replica

_ALL = "[::]:"
_log = logging.getLogger("runtime.replicas")


def keep_to_loopback() -> None:
    """Where Ray's other processes listen on a loopback address, have this one do so, too. Call it while a deployment is
    constructed: next, Ray Serve opens a port to all the world at which other deployments may call this one."""
    if not ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback:
        return  # a cluster, whose machines have to reach each other
    open_port: Any = getattr(replica, "add_port_to_grpc_server", None)
    if open_port is None:
        _log.warning("this version of Ray opens ports in a way that is not known here: they may be open to all")
        return

    def on_loopback(server: Any, address: str) -> Any:
        return open_port(server, address.replace(_ALL, "127.0.0.1:"))

    replica.add_port_to_grpc_server = on_loopback
