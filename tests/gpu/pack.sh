#!/usr/bin/env bash
# What the GPU tests need on a host that has Python, a driver and this checkout, but reaches no package registry.
#
#   tests/gpu/pack.sh DEST [PYTAG]     PYTAG: the host's CPython, default 312
#
# Run it where packages can be installed, with the plugins built (make plugins) and TensorRT-RTX of VERSION importable by
# PYTHON. Leaves DEST/a and DEST/b, each below 64 MB, for hosts that take no more at once. docs/gpu.md says how to go on.
# 1.6.1 is the newest TensorRT-RTX that runs on compute capability 9.0; for newer cards set VERSION.
set -euo pipefail
dest=${1:?usage: pack.sh DEST [PYTAG]}
pytag=${2:-312}
version=${VERSION:-1.6.1.120}
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/../.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/nextn-trt/tensorrt-rtx-$version-$pytag
mkdir -p "$cache" "$dest/a" "$dest/b"
dest=$(cd "$dest" && pwd)

"$python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$cache" \
  --python-version "${pytag:0:1}.${pytag:1}" --implementation cp --abi "cp$pytag" --abi none --abi abi3 \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any \
  "tensorrt-rtx-cu13-libs==$version" "tensorrt-rtx-cu13-bindings==$version" gguf onnx-graphsurgeon polygraphy

if [ ! -s "$cache/core.xz" ]; then # about two minutes, once
  unzip -p "$cache"/tensorrt_rtx_cu13_libs-*.whl tensorrt_rtx_libs/libtensorrt_rtx.so.1 | xz -6 -T0 >"$cache/core.xz.part"
  mv "$cache/core.xz.part" "$cache/core.xz"
fi
head --bytes=15000000 "$cache/core.xz" >"$dest/a/core.xz.0"
tail --bytes=+15000001 "$cache/core.xz" >"$dest/b/core.xz.1"
unzip -q -o -j "$cache"/tensorrt_rtx_cu13_libs-*.whl tensorrt_rtx_libs/libtensorrt_onnxparser_rtx.so.1 -d "$dest/b"
cp "$cache"/tensorrt_rtx_cu13_bindings-*.whl "$cache"/gguf-*.whl "$cache"/onnx_graphsurgeon-*.whl "$cache"/polygraphy-*.whl "$dest/b/"

# Engines and reference logits; the trained model's own file is part of the checkout.
(cd "$root" && "$python" -m tests.gpu.prepare "$cache/prepared")
tar -C "$cache/prepared" --no-wildcards-match-slash --exclude=./.canonical --exclude='./*.gguf' \
  '--exclude=./trained*/model.gguf' --sort=name -cf - . | xz -9 >"$dest/a/prepared.tar.xz" # -9: engines are much alike
tar -C "$root/build/plugins" -cJf "$dest/b/plugins.tar.xz" libnextn_kernels.so libnextn_plugins.so
cp "$root/tests/gpu/unpack.sh" "$dest/b/"
du -sh "$dest/a" "$dest/b"
