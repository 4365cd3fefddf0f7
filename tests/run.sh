#!/usr/bin/env bash
# Sets everything up and runs every test; the last line is 'N passed, N failed, N skipped'.
#
#   bash tests/run.sh              # everything
#   bash tests/run.sh --quick      # what a change breaks first, in minutes: house rules, the C++
#                                  # programs side by side, the core of the Python tests
#   LIBDDP_VENV=~/venv bash tests/run.sh   # in an environment that has torch already
#
# What runs: house rules, C++ tests of every room against the installed library, Python tests, systems
# of several hosts (network namespaces: as root, else skipped), the core under address,
# undefined-behaviour and thread sanitizers, fuzz targets for two seconds each (LIBDDP_FUZZ_SECONDS
# for longer; clang, else skipped), a C++ program that consumes the installed package.
set -uo pipefail
if [ $# -gt 1 ] || { [ $# = 1 ] && [ "$1" != --quick ]; }; then
    echo "usage: bash tests/run.sh [--quick]" >&2
    exit 2
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

# shellcheck source=../examples/setup.sh
LIBDDP_EXTRAS=test
LIBDDP_SYSTEM_PACKAGES="catch2"
source examples/setup.sh || exit 1

build="${LIBDDP_TEST_BUILD:-build/tests}"
results="$PWD/$build/results"
rm -rf "$results"
mkdir -p "$results"
export PATH="$LIBDDP_VENV/bin:$PATH"
export OMP_NUM_THREADS=1
python="$LIBDDP_VENV/bin/python"
package="$("$python" -m libddp --cmake-dir)" || exit 1
failed_steps=()

# step NAME COMMAND...: runs it, and remembers a failure so that the tally cannot miss it.
step() {
    local name="$1" start=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    if "$@"; then
        printf -- '-- %s: %d s\n' "$name" $((SECONDS - start))
    else
        printf -- '-- %s: FAILED after %d s\n' "$name" $((SECONDS - start))
        failed_steps+=("$name")
    fi
}

# build_tests DIRECTORY PREFIX CMAKE_ARGUMENTS...: configure, build.
build_tests() {
    local directory="$1" prefix="$2"
    shift 2
    cmake -S . -B "$directory" -G Ninja -DPython_EXECUTABLE="$python" -DLIBDDP_BUILD_TESTS=ON \
        -DLIBDDP_WERROR=ON -DCMAKE_UNITY_BUILD=ON -DLIBDDP_TEST_RESULTS="$results/$prefix" "$@" \
        >"$results/$prefix-cmake.log" ||
        { cat "$results/$prefix-cmake.log"; return 1; }
    ninja -C "$directory" --quiet
}

# build_and_test DIRECTORY PREFIX CMAKE_ARGUMENTS...: configure, build, ctest.
build_and_test() {
    local directory="$1" prefix="$2"
    build_tests "$@" || return 1
    # What failed is named where it failed: the programs' own output is long.
    ctest --test-dir "$directory" --timeout 900 || {
        "$python" tests/tally.py "$results/$prefix"
        tail -n 40 "$directory/Testing/Temporary/LastTest.log"
        return 1
    }
}

run_pytest() {
    local name="$1"
    shift
    "$python" -m pytest -p no:cacheprovider --junit-xml="$results/$name.xml" "$@"
}

# Whether clang++ and libFuzzer are there.
can_fuzz() {
    local body='extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }'
    clang++ -x c++ - -fsanitize=fuzzer,address -o "$results/can-fuzz" <<<"$body" 2>/dev/null
}

fuzz() {
    local directory="$build/fuzz"
    can_fuzz || libddp_need clang libclang-rt-dev
    if ! can_fuzz; then
        echo 'SKIPPED: no clang++ with libFuzzer here (Debian: clang, libclang-rt-dev)'
        echo '<testsuite><testcase classname="fuzz" name="all, for want of clang"><skipped/>' \
            '</testcase></testsuite>' >"$results/fuzz.xml"
        return 0
    fi
    cmake -S . -B "$directory" -G Ninja -DCMAKE_CXX_COMPILER=clang++ \
        -DPython_EXECUTABLE="$python" -DLIBDDP_CORE_ONLY=ON -DLIBDDP_BUILD_FUZZERS=ON \
        -DLIBDDP_WERROR=ON -DCMAKE_UNITY_BUILD=ON >"$results/fuzz-cmake.log" ||
        { cat "$results/fuzz-cmake.log"; return 1; }
    ninja -C "$directory" --quiet fuzzers || return 1
    ctest --test-dir "$directory" --output-on-failure --output-junit "$results/fuzz.xml"
}

# The programs mostly wait, so that they share two cores well.
quick_programs() {
    build_tests "$build/cpp" cpp -DLIBDDP_PREBUILT="$package" || return 1
    mkdir -p "$results/cpp"
    find "$build/cpp/tests" -maxdepth 1 -name 'libddp_test_*' -type f -executable -print0 |
        xargs -0 -P 4 -I{} sh -c 'exec timeout 600 "$1" -r junit -o "$2/${1##*_}.xml" >/dev/null' \
            sh {} "$results/cpp"
}

# One file per thing that people use.
quick_python=(
    distributed/test_calls.py
    distributed/test_against_gloo.py
    ddp/test_parity.py
    fsdp/test_parity.py
    activation/test_checkpoint.py
    optim
)

if [ "${1:-}" = --quick ]; then
    step "house rules" run_pytest house tests/house
    step "C++ tests" quick_programs
    step "the core of the Python tests" run_pytest python "${quick_python[@]/#/tests/python/}"
    exec "$python" tests/tally.py "$results" "${failed_steps[@]+"${failed_steps[@]}"}"
fi

step "house rules" run_pytest house tests/house
step "C++ tests" build_and_test "$build/cpp" cpp -DLIBDDP_PREBUILT="$package"
step "Python tests" run_pytest python tests/python
step "systems of several hosts" run_pytest systems tests/systems
step "core under the address and undefined sanitizers" build_and_test "$build/address" address \
    -DLIBDDP_CORE_ONLY=ON -DLIBDDP_SANITIZE=address,undefined
step "core under the thread sanitizer" build_and_test "$build/thread" thread \
    -DLIBDDP_CORE_ONLY=ON -DLIBDDP_SANITIZE=thread
step "fuzz targets" fuzz
consume() {
    cmake -S tests/consume -B "$build/consume" -G Ninja -DCMAKE_PREFIX_PATH="$package" \
        -DPython_EXECUTABLE="$python" >"$results/consume-cmake.log" &&
        ninja -C "$build/consume" --quiet &&
        ctest --test-dir "$build/consume" --output-on-failure --output-junit "$results/consume.xml"
}
step "a C++ program that consumes the package" consume

exec "$python" tests/tally.py "$results" "${failed_steps[@]+"${failed_steps[@]}"}"
