"""`python -m runtime.serve_ray MODEL`: the server of `runtime.serve` on several GPUs or machines, over Ray Serve.

Exit codes are those of `runtime.generate`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import signal
import sys
import threading
from typing import Any

from engines.errors import ResourceError, UsageError
from engines.manifest import load_manifest
from runtime.command_line import run_command, say
from runtime.engine import SEQUENCES_DEFAULT
from runtime.model_cache import exported_folder
from runtime.serve import MIB, answered_hosts, check_options, key_of, server_parser
from runtime.session import SpecOptions

NAME = "nextn-trt"
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
_HEALTH_PERIOD_S = 5.0


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    _export(options)  # once, and before any replica: what is wrong with the file is said here
    start_ray()
    import ray
    from ray import serve

    asked_to_end = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked_to_end.set())
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": options.host, "port": options.port})
        serve.run(application(options), name=NAME)
        say(f"listening on http://{options.host}:{options.port}, replicas: {_num_replicas(options)}", to=sys.stderr)
        asked_to_end.wait()
    except RuntimeError as error:
        raise ResourceError(f"Ray could not start the replicas ({error})") from error
    finally:
        serve.shutdown()
        ray.shutdown()
    return 0


def start_ray(**more: Any) -> None:
    """Join the cluster that RAY_ADDRESS names, or start one of this machine alone, whose processes listen on loopback
    addresses: Ray has no authentication. more: of ray.init."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing here reports to anybody
    local = os.environ.get("RAY_ADDRESS") in (None, "", "local")
    if local:
        # Ray reads it when it is imported. Without it, Ray resolves even 127.0.0.1 to an address that others can reach;
        # where it does not support clusters, this is its default.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        more = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1", **more}
    import ray

    ray.init(**more)


def build(given: dict[str, str]) -> Any:
    """The application for `serve run runtime.serve_ray:build arguments="MODEL --replicas 2"` and for Ray's config
    files. Host and port are then Ray's to set."""
    return application(_options(shlex.split(given["arguments"])))


def application(options: argparse.Namespace) -> Any:
    """Replicas with a front. Needs a running Ray."""
    from ray import serve

    from runtime.replicas.front import Front
    from runtime.replicas.replica import Replica
    from runtime.server.security import Limits

    at_once = options.sequences or SEQUENCES_DEFAULT
    replicas = _num_replicas(options)
    scale: dict[str, Any] = {"num_replicas": replicas}
    if options.max_replicas > replicas:
        bounds = {"min_replicas": replicas, "max_replicas": options.max_replicas}
        scale = {"autoscaling_config": {**bounds, "target_ongoing_requests": at_once}}
    replica = serve.deployment(
        name="replica",
        ray_actor_options={"num_cpus": max(1, options.threads), "num_gpus": int(_on_gpu(options))},
        max_ongoing_requests=at_once + options.queue,
        request_router_config={"request_router_class": _ROUTER},
        health_check_period_s=_HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=options.grace,
        **scale,
    )(Replica)
    limits = Limits(body_bytes=options.max_body * MIB, api_key=key_of(options), hosts=answered_hosts(options))
    front = serve.deployment(
        name="front", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=100_000, num_replicas=1
    )(Front)
    return front.bind(replica.bind(options), limits)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    """Checked. Raises UsageError."""
    parser = server_parser("runtime.serve_ray", "Serve a Qwen3.5-family model on several GPUs or machines, over Ray.")
    group = parser.add_argument_group("replicas")
    group.add_argument(
        "--replicas", type=int, default=0, metavar="N", help="0: one per GPU, one without GPUs (default)"
    )
    group.add_argument("--max-replicas", type=int, default=0, metavar="N", help="let Ray add up to so many under load")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("ray") is None:
        raise UsageError("several replicas need ray; pip install 'nextn-trt[ray]'")
    check_options(options)
    if not 0 <= options.replicas <= 4096 or not 0 <= options.max_replicas <= 4096:
        raise UsageError("--replicas and --max-replicas: wanted 0 to 4096")
    if 0 < options.max_replicas < options.replicas:
        raise UsageError(f"--max-replicas {options.max_replicas}: wanted --replicas {options.replicas} or more")
    if options.port == 0:
        raise UsageError("--port 0: Ray needs a number of its own")
    options.model = options.model.absolute()  # replicas have another current folder
    if options.cache_dir is not None:
        options.cache_dir = options.cache_dir.absolute()
    return options


def _export(options: argparse.Namespace) -> None:
    spec = SpecOptions(options.spec_type, options.spec_draft_n_max)
    spec.validate()
    exported_folder(options.model, draft=spec.wants_draft, cache_dir=options.cache_dir)


def _on_gpu(options: argparse.Namespace) -> bool:
    """TensorRT engines run on a GPU each, exports for ONNX Runtime and .gguf files on the CPU."""
    if not options.model.is_dir():
        return False
    return bool(load_manifest(options.model).target == "tensorrt")


def _num_replicas(options: argparse.Namespace) -> int:
    if options.replicas:
        return int(options.replicas)
    import ray

    return max(1, int(ray.cluster_resources().get("GPU", 0))) if _on_gpu(options) else 1


if __name__ == "__main__":
    run_command(main)
