#!/usr/bin/env bash
# The fuzz targets under AFL++ instead of libFuzzer: it mutates and schedules differently.
#
#   bash tests/fuzz/afl.sh BUILD_FOLDER [SECONDS_PER_TARGET] [TARGET...]
#
# One line per target: executions, crashes, hangs. What was found stands in BUILD_FOLDER/afl.
# Needs afl-fuzz and afl-clang-fast++ (Debian: afl++).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build="$1" seconds="${2:-60}"
targets=("${@:3}")

cmake -S . -B "$build" -G Ninja -DCMAKE_CXX_COMPILER=afl-clang-fast++ -DLIBDDP_CORE_ONLY=ON \
    -DLIBDDP_BUILD_FUZZERS=ON >/dev/null
AFL_QUIET=1 ninja -C "$build" --quiet fuzzers
if [ ${#targets[@]} -eq 0 ]; then
    for source in tests/fuzz/*_fuzz.cpp; do targets+=("$(basename "$source" _fuzz.cpp)"); done
fi
export AFL_NO_UI=1 AFL_NO_AFFINITY=1 AFL_SKIP_CPUFREQ=1 AFL_I_DONT_CARE_ABOUT_MISSING_CRASHES=1
status=0
for name in "${targets[@]}"; do
    found="$build/afl/$name"
    rm -rf "$found"
    mkdir -p "$found"
    # -t: what takes longer is a hang; -m none: AddressSanitizer maps more than there is memory.
    afl-fuzz -V "$seconds" -t 5000 -m none -i "tests/fuzz/corpus/$name" -o "$found" \
        -- "$build/tests/fuzz/${name}_fuzz" >"$found/log" 2>&1 || { tail -20 "$found/log"; status=1; }
    value() { sed -n "s/^$1 *: //p" "$found/default/fuzzer_stats"; }
    printf '%-8s %6s s %10s executions %3s crashes %3s hangs  %s of edges\n' "$name" \
        "$(value run_time)" "$(value execs_done)" "$(value saved_crashes)" "$(value saved_hangs)" \
        "$(value bitmap_cvg)"
    [ "$(value saved_crashes)$(value saved_hangs)" = 00 ] || status=1
done
exit "$status"
