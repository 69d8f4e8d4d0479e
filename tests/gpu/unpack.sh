# On the GPU host, from the root of the checkout: `source DIR/unpack.sh DIR`, DIR holding the files of both of pack.sh's
# folders. Leaves TensorRT-RTX importable in this shell, the plugins in build/plugins, and what the tests read in
# $PREPARED.
_from=$(cd "${1:?usage: source unpack.sh DIR}" && pwd)
_site=$_from/site
PREPARED=$_from/prepared
if [ ! -e "$_site/.done" ]; then
  mkdir -p "$_site/tensorrt_rtx_libs" "$_site/tensorrt_rtx" "$PREPARED" build/plugins
  cat "$_from/core.xz.0" "$_from/core.xz.1" | xz -d -T0 >"$_site/tensorrt_rtx_libs/libtensorrt_rtx.so.1"
  cp "$_from/libtensorrt_onnxparser_rtx.so.1" "$_site/tensorrt_rtx_libs/"
  ln -sf libtensorrt_rtx.so.1 "$_site/tensorrt_rtx_libs/libtensorrt_rtx.so"
  touch "$_site/tensorrt_rtx_libs/__init__.py"
  printf 'from tensorrt_rtx_bindings import *\nfrom tensorrt_rtx_bindings import __version__\n' >"$_site/tensorrt_rtx/__init__.py"
  python3 -m pip install -q --no-index --no-deps --no-compile --target "$_site" "$_from"/*.whl
  tar -C "$PREPARED" -xJf "$_from/prepared.tar.xz"
  for _folder in "$PREPARED"/trained*/; do ln -sf "$PWD/tests/model/tiny-qwen35-mtp-Q4_K_M.gguf" "$_folder/model.gguf"; done
  tar -C build/plugins -xJf "$_from/plugins.tar.xz"
  touch "$_site/.done"
fi
export PREPARED PYTHONPATH=$PWD:$_site${PYTHONPATH:+:$PYTHONPATH}
export LD_LIBRARY_PATH=$_site/tensorrt_rtx_libs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
