#!/usr/bin/env bash
# How many lines of the parsers the fuzz targets reach: a table, one line per file.
#
#   bash tests/fuzz/coverage.sh BUILD_FOLDER [SECONDS_PER_TARGET]
#
# From the kept corpus and what the given seconds (60) find, without sanitizers. Needs clang, and
# llvm-cov and llvm-profdata of the same version (Debian: llvm).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build="$(realpath -m "$1")" seconds="${2:-60}"

cmake -S . -B "$build" -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DLIBDDP_CORE_ONLY=ON \
    -DLIBDDP_BUILD_FUZZERS=ON -DLIBDDP_FUZZ_COVERAGE=ON >/dev/null
ninja -C "$build" --quiet fuzzers
rm -f "$build"/*.profraw
LLVM_PROFILE_FILE="$build/%p.profraw" LIBDDP_FUZZ_SECONDS="$seconds" \
    ctest --test-dir "$build" --output-on-failure >/dev/null
llvm-profdata merge -sparse "$build"/*.profraw -o "$build/fuzz.profdata"

parsers=(
    transport/frame
    bootstrap/{link_handshake,link_acceptor,link_connector,link_address,peer_info,bootstrap_failure}
    bootstrap/{record,local_request}
    bootstrap/{bootstrap_session,sealed_store}
    collectives/{link_header,link_messages,link_stage,link_pump}
    watchdog/control_message
    rendezvous/rendezvous_url
)
programs=("$build"/tests/fuzz/*_fuzz)
llvm-cov export -summary-only -instr-profile "$build/fuzz.profdata" \
    "${programs[0]}" "${programs[@]/#/-object=}" 2>/dev/null |
    python3 -c '
import json, sys
files = json.load(sys.stdin)["data"][0]["files"]
for name in sys.argv[1:]:
    path = f"libddp/{name}.cpp"
    lines = next(f["summary"]["lines"] for f in files if f["filename"].endswith(path))
    print("%-42s %4d of %4d lines  %5.1f %%" % (
        path, lines["covered"], lines["count"], lines["percent"]))' "${parsers[@]}"
