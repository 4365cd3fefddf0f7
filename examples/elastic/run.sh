#!/usr/bin/env bash
# Sets libddp up, and kills workers, the agent and a host of a training on this machine.
#
#   bash examples/elastic/run.sh [OUT_DIR] [--key=value ...]
#
# OUT_DIR (default: out/elastic in the checkout) receives demo.json, loss.png, the steps and what the
# launchers have said. A minute or two behind the installation. The hosts are network namespaces,
# which need root: without, a host can come and leave, and its death is left out.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# shellcheck source=examples/setup.sh
. "$root/examples/setup.sh"

out=$root/out/elastic
if [ $# -gt 0 ] && [[ $1 != --* ]]; then
    out=$1
    shift
fi
exec "$LIBDDP_VENV/bin/python" "$root/examples/elastic/demo.py" --out_dir="$out" "$@"
