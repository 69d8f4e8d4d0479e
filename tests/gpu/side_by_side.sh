#!/usr/bin/env bash
# Every file of GPU tests in a process of its own, all at once, dealt out to the GPUs.
#
#   tests/gpu/side_by_side.sh LOGS [PREPARED]
#
# From the root of the checkout, with the plugins built; PREPARED: what `python -m tests.gpu.prepare` made. Leaves a log for
# each file in LOGS and, as soon as it has ended, a line in LOGS/summary.txt: of a run that is cut off, what it knew by then.
# LIMIT: seconds that each may take (300); PYTHON. Exit code 0 only if all passed.
set -uo pipefail
logs=${1:?usage: side_by_side.sh LOGS [PREPARED]}
prepared=${2:-}
limit=${LIMIT:-300}
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
mkdir -p "$logs"
logs=$(cd "$logs" && pwd)
rm -f "$logs"/summary.txt
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)

test_file() { # FILE GPU
  local name start=$SECONDS code last
  name=$(basename "$1" .py)
  CUDA_VISIBLE_DEVICES=$2 timeout "$limit" "$python" -m pytest "$1" -m gpu --require-gpu -rs -p no:cacheprovider \
    ${prepared:+--prepared "$prepared"} >"$logs/$name.log" 2>&1
  code=$?
  last=$(grep -E '[0-9] (passed|failed|skipped|deselected|error)' "$logs/$name.log" | tail -1)
  [ -n "$last" ] || last=$(grep -v '^$' "$logs/$name.log" | tail -1)
  echo "$name: exit $code in $((SECONDS - start)) s; $last" >>"$logs/summary.txt"
}

n=0
for file in tests/gpu/test_*.py tests/kernels/test_*.py; do
  test_file "$file" $((gpus > 0 ? n % gpus : 0)) &
  n=$((n + 1))
done
wait

sort "$logs/summary.txt"
if [ "$(grep -c ': exit 0 ' "$logs/summary.txt")" -ne "$n" ]; then
  echo "GPU tests: NOT all passed, logs in $logs"
  exit 1
fi
echo "GPU tests: $n files, all passed"
