"""A model in TensorRT form -> engine file: input shapes, profiles, import, build. Needs no GPU."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import onnx
from onnx import TensorProto, helper

from engines.engine_manifest import Binding, Profile
from engines.errors import EngineError, ResourceError
from engines.mapped_weights import MappedWeights
from engines.signals import signals_kept
from export.rtx16_dialect import to_rtx16
from export.weight_inputs import weights_as_inputs
from plugins import ops
from plugins.load import tensorrt, trt
from plugins.log import Messages, logger, messages

_DTYPES: dict[int, str] = {
    TensorProto.FLOAT: "float32",
    TensorProto.FLOAT16: "float16",
    TensorProto.INT32: "int32",
    TensorProto.INT8: "int8",
}
Progress = Callable[[str, float], None]
Places = Sequence[tuple[str, int, int]]


def load_graph(path: Path) -> onnx.ModelProto:
    """A model in TensorRT form, its weights left where they are. Raises EngineError when it is not of this version."""
    model = onnx.load(str(path), load_external_data=False)
    for node in model.graph.node:
        if node.domain == ops.DOMAIN and not _keeps_contract(node):
            raise EngineError(f"{path}: {node.op_type} of another version; run `python -m export` again")
    return model


def _keeps_contract(node: onnx.NodeProto) -> bool:
    op = ops.OPS.get(node.op_type)
    values = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    if op is None or set(values) != {each.name for each in op.attributes} or len(node.output) != len(op.outputs):
        return False
    inputs = 0
    for tensor in op.inputs:
        if tensor.name.endswith("*"):
            inputs += len(values["types"])
        else:
            inputs += values[f"has_{tensor.name[:-1]}"] if tensor.name.endswith("?") else 1
    return len(node.input) == inputs


def fix_sizes(model: onnx.ModelProto, sizes: dict[str, int]) -> onnx.ModelProto:
    """A copy of ``model`` with named dimensions of its inputs and outputs (P, L) replaced by numbers."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.value_info[:]  # may name the same dimensions, and TensorRT infers shapes itself
    for value in (*changed.graph.input, *changed.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    return changed


def bindings(model: onnx.ModelProto) -> tuple[tuple[Binding, ...], tuple[Binding, ...]]:
    """Inputs and outputs of a model in TensorRT form, weights left out."""
    aliases = {}
    for node in model.graph.node:
        if node.domain == ops.DOMAIN:
            op = ops.OPS[node.op_type]
            for index, name in enumerate(node.output):
                if op.alias_of(index) >= 0:
                    aliases[name] = node.input[op.alias_of(index)]

    def binding(value: onnx.ValueInfoProto) -> Binding:
        kind = value.type.tensor_type
        shape = tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim)
        return Binding(value.name, _DTYPES[kind.elem_type], shape, aliases.get(value.name, ""))

    return tuple(map(binding, model.graph.input)), tuple(map(binding, model.graph.output))


def build_engine(
    model: onnx.ModelProto,
    model_path: Path,
    profiles: Sequence[Profile],
    engine_path: Path,
    *,
    embed_weights: bool,
    progress: Progress = lambda phase, fraction: None,
    layers: list[str] | None = None,
) -> tuple[int, str]:
    """Build ``model`` (sizes fixed) into ``engine_path``; its size in bytes and content hash.

    model_path: beside it lies the external data. progress is told the phase and how much of it is done. layers: takes
    the engine's layer listing, a line each. The plugins must be loaded. Raises EngineError, ResourceError (disk), and
    what ``progress`` raises."""
    if not embed_weights:
        model = weights_as_inputs(model)
    if not tensorrt().imports_by_name:
        model = to_rtx16(model)
    with messages() as log, MappedWeights(model, model_path.parent) as weights:
        return _build(model, model_path, weights, profiles, engine_path, progress, log, layers)


def _build(
    model: onnx.ModelProto,
    model_path: Path,
    weights: MappedWeights,
    profiles: Sequence[Profile],
    engine_path: Path,
    progress: Progress,
    log: Messages,
    layers: list[str] | None,
) -> tuple[int, str]:
    builder, network, _ = _imported(model, model_path, weights.places, log)
    guard = _Guard()
    config = _config(builder, network, profiles)
    monitor = _monitor(progress, guard)
    config.progress_monitor = monitor
    with open(engine_path, "wb") as file:
        output = _Output(file)
        with signals_kept(guard.keep):
            done = _serialize(builder, network, config, output, guard)
        guard.check(engine_path)
    if not done:
        raise EngineError(f"{model_path}: {_api_name()} builds no engine: {log.first_error}")
    if layers is not None:
        layers.extend(log.layers)
    return output.nbytes, output.digest.hexdigest()


def import_network(model: onnx.ModelProto, model_path: Path, places: Places) -> tuple[Any, Any, Any]:
    """Builder, network and parser of ``model``, for tools that build themselves. The plugins must be loaded.

    places: name, address and bytes of every weight in external data, which must stay until the engine is built.
    Raises EngineError."""
    if not tensorrt().imports_by_name:
        model = to_rtx16(model)
    with messages() as log:
        return _imported(model, model_path, places, log)


def _imported(model: onnx.ModelProto, model_path: Path, places: Places, log: Messages) -> tuple[Any, Any, Any]:
    guard = _Guard()
    with signals_kept(guard.keep):  # an exception in a message's handler would be swallowed
        builder = trt.Builder(logger())
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger())
        taken = _import(parser, model, model_path, places)
    guard.check(model_path)
    if not taken:
        errors = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise EngineError(f"{model_path}: {_api_name()} cannot import it: {errors or log.first_error}")
    return builder, network, parser


def _api_name() -> str:
    return f"{tensorrt().name} {tensorrt().version}"


def _import(parser: Any, model: onnx.ModelProto, model_path: Path, places: Places) -> bool:
    """Whether the parser took the model, its weights being ours; full TensorRT before 10.13 maps them itself."""
    if not hasattr(parser, "load_initializer"):
        return bool(parser.parse(model.SerializeToString(), str(model_path)))
    loaded = parser.load_model_proto(model.SerializeToString(), str(model_path))
    loaded = loaded and all(parser.load_initializer(*place) for place in places)
    return bool(loaded and parser.parse_model_proto())


def _config(builder: trt.Builder, network: trt.INetworkDefinition, profiles: Sequence[Profile]) -> trt.IBuilderConfig:
    config = builder.create_builder_config()
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    config.max_aux_streams = 0  # one stream: a pass is captured as a CUDA graph, and its kernels overlap by themselves
    # Not REQUIRE_USER_ALLOCATION: such engines end the process at their first pass when a size is dynamic (RTX 1.6).
    for limits in profiles:
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            shape = tensor.shape[:]
            if -1 not in shape:
                continue
            largest = limits.max_rows if tensor.name == "rows" else limits.max_tokens
            low, high = (trt.Dims([size if dim == -1 else dim for dim in shape]) for size in (1, largest))
            profile.set_shape(tensor.name, min=low, opt=high, max=high)
        config.add_optimization_profile(profile)
    return config


def _serialize(
    builder: trt.Builder,
    network: trt.INetworkDefinition,
    config: trt.IBuilderConfig,
    output: _Output,
    guard: _Guard,
) -> bool:
    """Build. The engine is written piece by piece, where TensorRT can do that; full TensorRT can from 10.13 on."""
    if hasattr(builder, "build_serialized_network_to_stream"):
        return builder.build_serialized_network_to_stream(network, config, _stream(trt, output, guard))
    plan = builder.build_serialized_network(network, config)
    return plan is not None and guard.run(lambda: output.write(memoryview(plan)))


class _Guard:
    """Runs Python code called by TensorRT. An exception must not cross its frames (that ends the process): the first is
    kept, the build is told to stop, and `check` raises it afterwards."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def run(self, call: Callable[[], object]) -> bool:
        """Whether it went well, now and before."""
        try:
            call()
        except BaseException as error:  # KeyboardInterrupt too
            self.keep(error)
        return self._error is None

    def keep(self, error: BaseException) -> None:
        self._error = self._error or error

    def check(self, path: Path) -> None:
        if isinstance(self._error, OSError):
            raise ResourceError(f"{path}: cannot be written ({self._error.strerror}); free space") from self._error
        if self._error is not None:
            raise self._error


class _Output:
    """The engine's file while it is being written; its size and hash."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.nbytes = file, 0
        self.digest = hashlib.blake2b(digest_size=20)

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.nbytes += len(data)


def _stream(api: Any, output: _Output, guard: _Guard) -> Any:
    # The API is not typed here: IStreamWriter is younger than the oldest TensorRT that will do, and is called back with
    # the bytes alone, which its stubs do not say.
    class Stream(api.IStreamWriter):
        def __init__(self) -> None:
            api.IStreamWriter.__init__(self)

        def write(self, data: bytes) -> int:
            return len(data) if guard.run(lambda: output.write(data)) else 0

    return Stream()


def _monitor(progress: Progress, guard: _Guard) -> trt.IProgressMonitor:
    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}

        def phase_start(self, name: str, parent: str | None, steps: int) -> None:
            self._steps[name] = max(1, steps)
            guard.run(lambda: progress(name, 0.0))

        def step_complete(self, name: str, step: int) -> bool:
            return guard.run(lambda: progress(name, min(1.0, (step + 1) / self._steps[name])))

        def phase_finish(self, name: str) -> None:
            guard.run(lambda: progress(name, 1.0))

    return Monitor()
