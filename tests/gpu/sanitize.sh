#!/usr/bin/env bash
# Our kernels under compute-sanitizer's memcheck and racecheck: small cases of the kernel tests and, given what
# `python -m tests.gpu.prepare` made, whole rounds on engines.
#
#   tests/gpu/sanitize.sh [PREPARED]
#
# From the root of the checkout, with the plugins built. LIMIT: seconds that each of the runs may take (all run at once);
# LOGS: where their output goes; PYTHON. One line a run and a verdict; exit code 0 only if all ran to their end clean.
set -uo pipefail
prepared=${1:-}
limit=${LIMIT:-110}
python=${PYTHON:-python3}
logs=${LOGS:-$(mktemp -d)}
mkdir -p "$logs"
command -v compute-sanitizer >/dev/null || export PATH=$PATH:/usr/local/cuda/bin
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
# Device arrays of the tests have a guard of bytes behind them, where memcheck sees nothing.
export NEXTN_TEST_GUARD=0

# Cases that run long even without a checker.
kernels=(-m pytest tests/kernels -m gpu --require-gpu -q -x -p no:cacheprovider --sample 6
  -k "not real_shapes and not long_contexts and not 16384")
rounds=(-m tests.gpu.rounds "$prepared/q4_k_m" "$prepared/mixed_types")

check() { # NAME TOOL PORT COMMAND...: run, leave one line in NAME.line
  local name=$1 tool=$2 port=$3 start=$SECONDS code summary end
  shift 3
  timeout "$limit" compute-sanitizer --tool "$tool" --kernel-name kns=nextn --report-api-errors no --port "$port" \
    --print-limit 20 --error-exitcode 99 "$python" "$@" >"$logs/$name.log" 2>&1
  code=$?
  summary=$(grep -oE '(ERROR|RACECHECK) SUMMARY: .*' "$logs/$name.log" | tail -1)
  end=$(grep -E '^(same texts|[0-9]+ passed)' "$logs/$name.log" | tail -1)
  echo "$code" >"$logs/$name.code"
  echo "$name: exit $code in $((SECONDS - start)) s; ${summary:-no summary}; ${end:-did not get to its end}" >"$logs/$name.line"
}

names=(kernels-memcheck kernels-racecheck)
check kernels-memcheck memcheck 50000 "${kernels[@]}" &
check kernels-racecheck racecheck 50100 "${kernels[@]}" &
if [ -n "$prepared" ]; then
  names+=(rounds-memcheck rounds-racecheck)
  check rounds-memcheck memcheck 50200 "${rounds[@]}" &
  check rounds-racecheck racecheck 50300 "${rounds[@]}" &
fi
wait

bad=0
for name in "${names[@]}"; do
  cat "$logs/$name.line"
  if [ "$(cat "$logs/$name.code")" != 0 ]; then
    bad=$((bad + 1))
    grep -E '^=+ (Invalid|Error|Warning|Potential|Misaligned|Uninit)|^E  |Error: ' "$logs/$name.log" | sort | uniq -c | sort -rn | head -5
  fi
done
[ "$bad" = 0 ] && echo "sanitizer: clean" || echo "sanitizer: $bad of ${#names[@]} runs NOT clean; logs in $logs"
exit "$bad"
