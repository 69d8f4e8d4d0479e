"""Wrong uses of full TensorRT's API, which the type check must find: mypy refuses an `ignore` where nothing is wrong.

`make lint` checks this file with the stubs of several TensorRT versions. It is never run.
"""

from __future__ import annotations

from pathlib import Path

from plugins.load import trt
from plugins.log import logger
from runtime.tensorrt_session import EngineLoader


def unknown_names(engine: trt.ICudaEngine, loader: EngineLoader) -> None:
    trt.Bilder(logger())  # type: ignore[attr-defined]
    print(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_04)  # type: ignore[attr-defined]
    trt.Builder(logger()).create_netwrk()  # type: ignore[attr-defined]
    print(engine.num_bindings)  # type: ignore[attr-defined]
    loader.context(engine, Path()).execute_v2_async(0)  # type: ignore[attr-defined]


def wrong_arguments(builder: trt.Builder, context: trt.IExecutionContext) -> None:
    builder.build_serialized_network(builder.create_network(1))  # type: ignore[call-arg]
    builder.create_optimization_profile().set_shape("x", 1, 2, 3)  # type: ignore[arg-type]
    builder.create_builder_config().add_optimization_profile("p")  # type: ignore[arg-type]
    context.set_tensor_address(0, "x")  # type: ignore[arg-type]
    context.set_optimization_profile_async("decode", 0)  # type: ignore[arg-type]
    trt.Runtime()  # type: ignore[call-arg]
    registry: trt.IPluginRegistry = trt.get_plugin_registry()
    registry.load_library(0)  # type: ignore[arg-type]


def wrong_results(engine: trt.ICudaEngine, network: trt.INetworkDefinition) -> None:
    name: str = network.num_inputs  # type: ignore[assignment]
    size: str = engine.get_device_memory_size_for_profile_v2(0)  # type: ignore[assignment]
    print(name, size)


class Monitor(trt.IProgressMonitor):
    def phase_start(self, name: str) -> None: ...  # type: ignore[override]
