#!/usr/bin/env bash
# Our kernels under compute-sanitizer's memcheck and racecheck: small cases of the kernel tests and, given what
# `python -m tests.gpu.prepare` made, whole rounds on engines.
#
#   tests/gpu/sanitize.sh [PREPARED]
#
# From the root of the checkout, with the plugins built. All runs go at once. LIMIT: seconds that each may take (110);
# LOGS: where their output goes; PYTHON. One line a run and a verdict; exit code 0 only if all ran to their end clean.
set -uo pipefail
prepared=${1:-}
limit=${LIMIT:-110}
python=${PYTHON:-python3}
logs=${LOGS:-$(mktemp -d)}
mkdir -p "$logs"
rm -f "$logs"/*.code
command -v compute-sanitizer >/dev/null || export PATH=$PATH:/usr/local/cuda/bin
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
# Device arrays of the tests have a guard of bytes behind them, where memcheck would see nothing.
export NEXTN_TEST_GUARD=0
port=50000

check() { # TOOL NAME COMMAND...: run, leave one line and the exit code
  local tool=$1 name=$1-$2 start=$SECONDS code summary end
  shift 2
  timeout "$limit" compute-sanitizer --tool "$tool" --kernel-name kns=nextn --report-api-errors no --port "$port" \
    --print-limit 20 --error-exitcode 99 "$python" "$@" >"$logs/$name.log" 2>&1
  code=$?
  # pyproject.toml has pytest's -q already; with another it would not say how many passed.
  summary=$(grep -oE '(ERROR|RACECHECK) SUMMARY: .*' "$logs/$name.log" | tail -1)
  end=$(grep -E '^(same texts|[0-9]+ passed)' "$logs/$name.log" | tail -1)
  [ -n "$end" ] || code=${code/#0/no-end}
  echo "$name: exit $code in $((SECONDS - start)) s; ${summary:-no summary}; ${end:-did not get to its end}" >"$logs/$name.line"
  echo "$code" >"$logs/$name.code"
}

cases() { # TOOL N: of every kernel test N cases
  local file which
  for file in tests/kernels/test_*.py; do
    # the kernels of test_layer.py, for what one launch does to another: neither tool looks for that
    [ "$(basename "$file")" = test_layer_chain.py ] && continue
    port=$((port + 20))
    which="not real_shapes and not long_contexts and not 16384 and not large and not memory_held" # those take long even without a checker
    [ "$1-$(basename "$file")" = racecheck-test_layer.py ] && which="1-tiny or 6-tiny" # see docs/gpu.md
    check "$1" "$(basename "$file" .py)" -m pytest "$file" -m gpu --require-gpu -x -p no:cacheprovider --sample "$2" \
      -k "$which" &
  done
}

cases memcheck 6
cases racecheck 3
if [ -n "$prepared" ]; then
  port=$((port + 20))
  check memcheck rounds -m tests.gpu.rounds "$prepared/q4_k_m" "$prepared/mixed_types" &
  port=$((port + 20))
  check racecheck rounds -m tests.gpu.rounds --few "$prepared/q4_k_m" &
fi
wait

cat "$logs"/*.line
runs=$(cat "$logs"/*.code | wc -l) bad=$(grep -Lx 0 "$logs"/*.code)
for code in $bad; do
  echo "-- $(basename "$code" .code)"
  grep -E '^=+ (Invalid|Error|Warning|Potential|Misaligned|Uninit)|^E  |Error: ' "${code%.code}.log" | sort | uniq -c | sort -rn | head -5
done
if [ -n "$bad" ]; then
  echo "sanitizer: NOT clean, logs in $logs"
  exit 1
fi
echo "sanitizer: $runs runs, all clean"
