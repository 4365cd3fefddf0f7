#!/usr/bin/env bash
# Sets everything up and runs every test; the last line is 'N passed, N failed, N skipped'.
#
#   bash tests/run.sh              # everything
#   bash tests/run.sh --quick      # what a change breaks first, in minutes: house rules, the C++
#                                  # programs side by side, the core of the Python tests
#   LIBDDP_VENV=~/venv bash tests/run.sh   # in an environment that has torch already
#   LIBDDP_TEST_MINUTES=85 bash tests/run.sh   # where somebody waits no longer: of the last steps,
#                                  # those that would take beyond that are left out, told and counted
#
# What runs: house rules, C++ tests of every room against the installed library, Python tests (what
# CUDA tensors need on a fake device), systems of several hosts (network namespaces: as root, else
# skipped), a C++ program that consumes the installed package, a few trials of each row of the failure
# table (tests/chaos), fuzz targets for two seconds each (LIBDDP_FUZZ_SECONDS for longer; clang, else
# skipped), the core under address, undefined-behaviour and thread sanitizers. Everything is built at
# low priority behind the house rules and the Python tests, which mostly wait; so do the systems of
# several hosts and the failures, behind which the sanitized programs run.
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
# Built with the C++ tests, where torch is a CUDA build; else the tests say that it is missing.
export LIBDDP_FAKEGPU="$PWD/$build/cpp/tests/libddp_fakegpu.so"
python="$LIBDDP_VENV/bin/python"
package="$("$python" -m libddp --cmake-dir)" || exit 1
failed_steps=()
times=()
declare -A builds # process ids
last_build=

# step NAME COMMAND...: runs it, and remembers a failure so that the tally cannot miss it.
step() {
    local name="$1" start=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    if "$@"; then
        times+=("$(printf '%5d s  %s' $((SECONDS - start)) "$name")")
    else
        times+=("$(printf '%5d s  %s: FAILED' $((SECONDS - start)) "$name")")
        failed_steps+=("$name")
    fi
    printf -- '-- %s\n' "${times[-1]}"
}

# step_of SECONDS NAME COMMAND...: a step that takes so long at most, if there is the time.
step_of() {
    local most="$1" name="$2"
    shift
    if [ -z "${LIBDDP_TEST_MINUTES:-}" ] || ((SECONDS + most <= 60 * LIBDDP_TEST_MINUTES)); then
        step "$@"
        return
    fi
    printf '\n== %s\nSKIPPED: it may take %d s, and %d of %d minutes are over\n' \
        "$name" "$most" $((SECONDS / 60)) "$LIBDDP_TEST_MINUTES"
    times+=("$(printf '%5d s  %s: SKIPPED, no time is left' 0 "$name")")
    echo "<testsuite><testcase classname=\"left out\" name=\"$name, for want of time\"><skipped/>" \
        '</testcase></testsuite>' >"$results/left-out-${#times[@]}.xml"
}

# finish: what the steps took, and the tally.
finish() {
    stop_builds # of steps that were left out
    printf '\n'
    printf '%s\n' "${times[@]}"
    printf '%5d s  in all, after installation\n' $((SECONDS - begin))
    exec "$python" tests/tally.py "$results" "${failed_steps[@]+"${failed_steps[@]}"}"
}

# build NAME COMMAND...: in the background, after the builds before it.
build() {
    behind "$1" 19 "${@:2}"
}

# behind NAME NICENESS COMMAND...: as `build`, of anything.
behind() {
    local name="$1" niceness="$2" before="$last_build"
    shift 2
    set -m # a process group of its own
    {
        [ -z "$before" ] || tail --pid="$before" -f /dev/null
        renice -n "$niceness" -p "$BASHPID" >/dev/null
        start=$SECONDS
        "$@" || exit 1
        echo $((SECONDS - start)) >"$results/$name.seconds"
    } >"$results/$name.log" 2>&1 &
    last_build=$!
    builds[$name]=$!
    set +m
}

# built NAME: waits for the end of that build; a failed one is shown and counts.
built() {
    local start=$SECONDS
    if ! wait "${builds[$1]}"; then
        cat "$results/$1.log"
        echo "<testsuite><testcase classname=\"build\" name=\"$1\"><failure>its output stands" \
            'above</failure></testcase></testsuite>' >"$results/$1-build.xml"
        return 1
    fi
    printf 'built in %d s behind other steps, waited for %d s of it\n' \
        "$(<"$results/$1.seconds")" $((SECONDS - start))
}

stop_builds() {
    local pid
    for pid in "${builds[@]}"; do
        kill -- "-$pid" 2>/dev/null
    done
}
trap stop_builds EXIT

# build_tests NAME CMAKE_ARGUMENTS...: configure, build.
build_tests() {
    local name="$1"
    shift
    cmake -S . -B "$build/$name" -G Ninja -DPython_EXECUTABLE="$python" -DLIBDDP_BUILD_TESTS=ON \
        -DLIBDDP_WERROR=ON -DCMAKE_UNITY_BUILD=ON -DLIBDDP_TEST_RESULTS="$results/$name" "$@" &&
        ninja -C "$build/$name"
}

# run_programs NAME NUMBER: so many at a time; they mostly wait.
run_programs() {
    built "$1" && test_programs "$1" "$2"
}

test_programs() {
    # What failed is named where it failed: the programs' own output is long.
    ctest --test-dir "$build/$1" --parallel "$2" || {
        "$python" tests/tally.py "$results/$1"
        tail -n 40 "$build/$1/Testing/Temporary/LastTest.log"
        return 1
    }
}

# run_behind NAME: the programs of a build, behind other steps.
run_behind() {
    behind "$1-programs" 5 test_programs "$1" 2
}

# ran NAME: waits for their end, and shows it.
ran() {
    local start=$SECONDS status=0
    built "$1" || return 1
    wait "${builds[$1-programs]}" || status=1
    cat "$results/$1-programs.log"
    printf 'ran behind other steps, waited for %d s\n' $((SECONDS - start))
    return "$status"
}

run_pytest() {
    local name="$1"
    shift
    "$python" -m pytest -p no:cacheprovider --junit-xml="$results/$name.xml" "$@"
}

# in_two_lanes NAME FIRST... -- SECOND...: two runs of pytest at once, as tests mostly wait; the
# output of the second follows that of the first.
in_two_lanes() {
    local name="$1" first=() second status=0
    shift
    while [ "$1" != -- ]; do
        first+=("$1")
        shift
    done
    shift
    run_pytest "$name-beside" "$@" >"$results/$name-beside.log" 2>&1 &
    second=$!
    run_pytest "$name" "${first[@]}" || status=1
    wait "$second" || status=1
    cat "$results/$name-beside.log"
    return "$status"
}

# Whether clang++ and libFuzzer are there.
can_fuzz() {
    local body='extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }'
    clang++ -x c++ - -fsanitize=fuzzer,address -o "$results/can-fuzz" <<<"$body" 2>/dev/null
}

build_fuzzers() {
    cmake -S . -B "$build/fuzz" -G Ninja -DCMAKE_CXX_COMPILER=clang++ \
        -DPython_EXECUTABLE="$python" -DLIBDDP_CORE_ONLY=ON -DLIBDDP_BUILD_FUZZERS=ON \
        -DLIBDDP_WERROR=ON -DCMAKE_UNITY_BUILD=ON && ninja -C "$build/fuzz" fuzzers
}

fuzz() {
    if ! can_fuzz; then
        echo 'SKIPPED: no clang++ with libFuzzer here (Debian: clang, libclang-rt-dev)'
        echo '<testsuite><testcase classname="fuzz" name="all, for want of clang"><skipped/>' \
            '</testcase></testsuite>' >"$results/fuzz.xml"
        return 0
    fi
    built fuzz || return 1
    ctest --test-dir "$build/fuzz" --parallel 2 --output-on-failure \
        --output-junit "$results/fuzz.xml"
}

build_consumer() {
    cmake -S tests/consume -B "$build/consume" -G Ninja -DCMAKE_PREFIX_PATH="$package" \
        -DPython_EXECUTABLE="$python" && ninja -C "$build/consume"
}

consume() {
    built consume &&
        ctest --test-dir "$build/consume" --output-on-failure --output-junit "$results/consume.xml"
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

# Those that start programs, which take as long as all others.
programs=(
    cmake_package cpp_example ddp_limits docs drop_in elastic examples gpt2_fsdp gpu mingpt plan
    snapshot_command snapshot_faces
)
programs=("${programs[@]/#/tests/python/}")
moves=tests/systems/test_hosts_store_moves.py

[ "${1:-}" = --quick ] || can_fuzz || libddp_need clang libclang-rt-dev
begin=$SECONDS

build cpp build_tests cpp -DLIBDDP_PREBUILT="$package"
if [ "${1:-}" = --quick ]; then
    step "house rules" run_pytest house tests/house
    step "C++ tests" run_programs cpp 4
    step "the core of the Python tests" run_pytest python "${quick_python[@]/#/tests/python/}"
    finish
fi
build consume build_consumer
! can_fuzz || build fuzz build_fuzzers
build address build_tests address -DLIBDDP_CORE_ONLY=ON -DLIBDDP_SANITIZE=address,undefined
build thread build_tests thread -DLIBDDP_CORE_ONLY=ON -DLIBDDP_SANITIZE=thread

step "house rules" run_pytest house tests/house
step "Python tests" in_two_lanes python \
    tests/python --ignore=tests/python/cuda "${programs[@]/#/--ignore=}" -- "${programs[@]}"
step "C++ tests" run_programs cpp 4
step "Python tests on the fake device" run_pytest cuda tests/python/cuda
run_behind address
run_behind thread
step "systems of several hosts" in_two_lanes systems tests/systems --ignore="$moves" -- "$moves"
step_of 300 "a C++ program that consumes the package" consume
step_of 300 "failures and snapshots" run_pytest chaos tests/chaos
step_of 300 "fuzz targets" fuzz
step_of 400 "core under the address and undefined sanitizers" ran address
step_of 600 "core under the thread sanitizer" ran thread
finish
