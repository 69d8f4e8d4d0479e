"""TensorRT engines: load one, bind its fixed memory, queue its passes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.engine_manifest import Engine, EngineManifest, Profile
from engines.errors import EngineError, ResourceError
from plugins.load import tensorrt, trt
from plugins.log import PLUGIN, Messages, logger, messages
from runtime.cuda import Device, DeviceBuffer, Stream, check_device

_REBUILD = "run `python -m engines.build` again"
_RESTART = "start it again, and if that does not help, look at nvidia-smi and run it under compute-sanitizer"
_LAUNCH = "launch failed"


class EngineSession:
    """One engine. A pass takes T tokens, gives logits of R rows, and queues on ``stream`` without waiting.

    Call `bind` once before the first pass, and `use` whenever the passes to come are another sequence's."""

    def __init__(self, loader: EngineLoader, folder: Path, manifest: EngineManifest, role: str, stream: Stream) -> None:
        self._spec: Engine = manifest.engines[role]
        self._path = manifest.file(folder, role)
        self._loader, self._stream = loader, stream
        self._engine = loader.load(self._path, self._spec)
        self._profiles = {profile.name: index for index, profile in enumerate(self._spec.profiles)}
        self._contexts: dict[str, trt.IExecutionContext] = {}
        self._state: Mapping[str, int] = {}
        self._state_of: dict[str, Mapping[str, int]] = {}  # what each context was last told
        self._dynamic = [binding for binding in self._spec.inputs if not all(isinstance(n, int) for n in binding.shape)]
        if self._engine.num_optimization_profiles != len(self._spec.profiles):
            raise EngineError(f"{self._path}: not the engine that engines.json describes; {_REBUILD}")

    @property
    def activation_nbytes(self) -> int:
        """Scratch memory of the profile that needs most."""
        return max(int(self._engine.get_device_memory_size_for_profile_v2(i)) for i in self._profiles.values())

    def bind(self, addresses: Mapping[str, int], scratch: DeviceBuffer, *owners: object) -> None:
        """Make a context per profile. addresses: of weights and whatever else stays where it is. scratch: for
        activations, shared with every engine on the stream. owners: of the memory, kept alive."""
        self._owners = (scratch, *owners)
        for name, index in self._profiles.items():
            context = self._loader.context(self._engine, self._path)
            with messages() as log:
                if not context.set_optimization_profile_async(index, self._stream.handle):
                    raise self._loader.error(f"{self._path}: profile {name} cannot be chosen", log)
            context.set_device_memory(scratch.address, scratch.nbytes)
            self._contexts[name] = context
            names = [binding.name for binding in (*self._spec.inputs, *self._spec.outputs)] + list(self._spec.weights)
            for tensor in names:
                if tensor in addresses:
                    self._set_address(context, tensor, addresses[tensor])
        self._stream.synchronize()

    def use(self, state: Mapping[str, int]) -> None:
        """Whose state the next passes are to read and write: addresses of the inputs that outputs alias. Never changed
        afterwards."""
        self._state = state

    def enqueue(self, profile: str, tokens: int, rows: int, addresses: Mapping[str, int]) -> None:
        """Queue a pass. addresses: of the inputs and outputs that `bind` was not told, or that have moved.

        Raises EngineError for sizes outside the profile."""
        context = self._contexts[profile]
        limits: Profile = self._spec.profiles[self._profiles[profile]]
        # TensorRT itself would notice only when the pass is queued, and not say what to do.
        if not (1 <= tokens <= limits.max_tokens and 1 <= rows <= limits.max_rows):
            raise EngineError(
                f"{self._path}: a pass of {tokens} tokens with {rows} rows of logits is outside profile {profile}, "
                f"which takes 1 to {limits.max_tokens} tokens and 1 to {limits.max_rows} rows; build engines with a "
                "larger --max-draft or --prefill-chunk"
            )
        sizes = {"T": tokens, "R": rows}
        for binding in self._dynamic:
            shape = tuple(size if isinstance(size, int) else sizes[size] for size in binding.shape)
            with messages() as log:
                if not context.set_input_shape(binding.name, shape):
                    raise self._loader.error(f"{self._path}: takes no {binding.name} of shape {list(shape)}", log)
        self._point(context, profile)
        for name, address in addresses.items():
            self._set_address(context, name, address)
        with messages() as log:
            if not context.execute_async_v3(self._stream.handle):
                raise self._loader.error(f"{self._path}: a {profile} pass of {tokens} tokens failed", log)

    def _point(self, context: trt.IExecutionContext, profile: str) -> None:
        """Let a context know the state in use, unless it does already."""
        if self._state_of.get(profile) is self._state:
            return
        for name, address in self._state.items():
            self._set_address(context, name, address)
        for output in self._spec.outputs:
            if output.alias in self._state:
                self._set_address(context, output.name, self._state[output.alias])
        self._state_of[profile] = self._state

    def _set_address(self, context: trt.IExecutionContext, name: str, address: int) -> None:
        with messages() as log:
            if not context.set_tensor_address(name, address):
                raise self._loader.error(f"{self._path}: takes no memory for {name}", log)


class EngineLoader:
    """TensorRT's runtime on one GPU. The plugins must be loaded."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._runtime = trt.Runtime(logger())

    def load(self, path: Path, spec: Engine) -> trt.ICudaEngine:
        """Deserialise an engine. Raises EngineError (damaged, of another version, GPU not supported)."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise EngineError(f"{path}: cannot be read ({error.strerror or error}); {_REBUILD}") from error
        if hashlib.blake2b(data, digest_size=20).hexdigest() != spec.digest:
            raise EngineError(f"{path}: its content is not what was built; {_REBUILD}")
        with messages() as log:
            engine = self._runtime.deserialize_cuda_engine(data)
            if engine is None:
                raise self.error(f"{path}: cannot be loaded on {self._device}", log)
        return engine

    def context(self, engine: trt.ICudaEngine, path: Path) -> trt.IExecutionContext:
        """An execution context whose memory is ours."""
        ours = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        with messages() as log:
            if hasattr(trt, "DynamicShapesKernelSpecializationStrategy"):
                context = engine.create_execution_context(_rtx_config(trt, engine, ours))
            else:
                context = engine.create_execution_context(ours)
            if context is None:
                raise self.error(f"{path}: no execution context", log)
        return context

    def error(self, what: str, log: Messages) -> EngineError | ResourceError:
        """The exception for a failed call, by the first error that TensorRT logged about it. Raises DeviceLostError
        when that comes of a GPU that has failed."""
        check_device()
        reason = " ".join(log.first_error.split())
        name = f"{tensorrt().name} {tensorrt().version}"
        if "compute capability" in reason.lower():
            return EngineError(
                f"{what}: {name} does not support this GPU ({reason}); install another TensorRT and build again"
            )
        if "out of memory" in reason.lower() or "OutOfMemory" in reason:
            return ResourceError(f"{what}: out of GPU memory ({reason}); use engines with a smaller --context")
        if reason.startswith(PLUGIN):
            return EngineError(f"{what}: {reason}; {_RESTART if _LAUNCH in reason else _REBUILD}")
        return EngineError(f"{what}: {name} says: {reason}; {_REBUILD}")


def _rtx_config(api: Any, engine: Any, strategy: Any) -> Any:
    """TensorRT-RTX's way of making contexts. Not typed: full TensorRT, whose stubs a type checker sees, has no such
    settings.

    TensorRT-RTX compiles kernels for shapes as it meets them. One kernel for all shapes leaves nothing to compile while
    a pass is being recorded, and rounds a token alike in passes of any size."""
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(strategy)
    config.dynamic_shapes_kernel_specialization_strategy = api.DynamicShapesKernelSpecializationStrategy.NONE
    return config
