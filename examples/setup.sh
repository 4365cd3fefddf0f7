#!/usr/bin/env bash
# Makes a virtual environment with libddp in it; does nothing, quietly, when nothing has changed.
#
#   . examples/setup.sh        # sets LIBDDP_VENV to the environment's full path
#   bash examples/setup.sh     # the same without setting anything
#
# LIBDDP_VENV             the environment; made if it is not there (default: .venv in the checkout)
# PYTHON                  the interpreter to make it with, 3.10 or newer (default: python3)
# LIBDDP_EXTRAS           extras of pyproject.toml to install (default: examples)
# LIBDDP_SYSTEM_PACKAGES  Debian packages that the caller needs besides (default: none)
# LIBDDP_SUDO=1           install missing Debian packages with sudo; root installs them without,
#                         everybody else is told what is missing
# LIBDDP_BEAT             seconds between two words of what is being done (default: 1 on a terminal,
#                         where a line is overwritten, else 30)

libddp_say() { printf 'setup: %s\n' "$*" >&2; }

# Installs Debian packages where we may, else says what is missing.
libddp_need() {
    local become=()
    libddp_say "missing system packages: $*"
    if [ "$(id -u)" != 0 ]; then
        if [ "${LIBDDP_SUDO:-0}" != 1 ]; then
            libddp_say "please install them (sudo apt-get install $*) and start again, or let this" \
                "script call sudo for it: LIBDDP_SUDO=1"
            return 1
        fi
        become=(sudo -n)
    fi
    if ! command -v apt-get >/dev/null || ! ${become[@]+"${become[@]}"} true 2>/dev/null; then
        libddp_say "please install them (apt-get install $*) and start again"
        return 1
    fi
    libddp_say "installing them with apt-get"
    ${become[@]+"${become[@]}"} apt-get update -qq >&2 || libddp_say "apt-get update failed"
    ${become[@]+"${become[@]}"} env DEBIAN_FRONTEND=noninteractive \
        apt-get install -y -qq "$@" >/dev/null || {
        libddp_say "apt-get could not install $*"
        return 1
    }
}

# What a build needs besides Python packages: a compiler, and Python's own headers and venv.
libddp_system() {
    local python=$1 missing=()
    command -v c++ >/dev/null || command -v g++ >/dev/null || missing+=(g++)
    if ! command -v "$python" >/dev/null; then
        missing+=(python3 python3-dev python3-venv)
    else
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
            libddp_say "$python is older than 3.10: set PYTHON to a newer interpreter"
            return 1
        }
        "$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
        "$python" -c 'import os, sys, sysconfig as s
sys.exit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))' ||
            missing+=(python3-dev)
    fi
    [ ${#missing[@]} = 0 ] || libddp_need "${missing[@]}"
}

# What the caller asked for, where there is a dpkg to tell what is there.
libddp_system_packages() {
    local name missing=()
    command -v dpkg-query >/dev/null || return 0
    for name in ${LIBDDP_SYSTEM_PACKAGES:-}; do
        dpkg-query --show --showformat='${Status}' "$name" 2>/dev/null | grep -q ' installed$' ||
            missing+=("$name")
    done
    [ ${#missing[@]} = 0 ] || libddp_need "${missing[@]}"
}

# A container that comes with a torch we support keeps it: no second download, the same CUDA.
libddp_has_torch() {
    "$1" - "$2/python/_build" <<'PYTHON' 2>/dev/null
import importlib.metadata
import pathlib
import sys

sys.path.insert(0, sys.argv[1])
import target_torch

torch = target_torch.Torch(pathlib.Path(), importlib.metadata.version("torch"))
oldest, newest = target_torch.SUPPORTED
sys.exit(sys.prefix != sys.base_prefix or not oldest <= torch.major_minor <= newest)
PYTHON
}

# What to install first where there is no torch yet. As a requirement of the build alone, pip would
# unpack its gigabytes a second time, into an environment for that build.
libddp_missing_torch() {
    "$1" - "$2/python/_build" <<'PYTHON' 2>/dev/null || return 0 # pip will say what is wrong
import sys

sys.path.insert(0, sys.argv[1])
import target_torch

print("" if target_torch.find() else target_torch.DEFAULT_REQUIREMENT)
PYTHON
}

# pip install with the given arguments, its output in LOG: every few seconds it says for how long it
# has run and what pip said last. If it fails, the end of LOG is shown.
libddp_pip() (
    local venv=$1 name=$2 log=$1/libddp-install.log
    shift 2
    set -o pipefail
    if "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar=off "$@" 2>&1 |
        libddp_beat "$name" "$log"; then
        return 0
    fi
    tail -n 100 "$log" >&2
    libddp_say "pip install ${*: -1} failed, see above (all of it: $log)"
    return 1
)

libddp_beat() {
    local name=$1 log=$2 begin=$SECONDS line='' rest='' said='' told=0 status=0 seconds
    local beat=30 start='' end='\n'
    if [ -t 2 ]; then beat=1 start='\r\033[K' end=''; fi
    beat=${LIBDDP_BEAT:-$beat}
    : >"$log"
    while [ "$status" = 0 ] || [ "$status" -gt 128 ]; do
        status=0
        IFS= read -r -t "$beat" line || status=$? # above 128: no whole line in that time
        rest+=$line
        if [ "$status" = 0 ]; then
            printf '%s\n' "$rest" >>"$log"
            said=$(libddp_trim "$rest") rest=''
        fi
        seconds=$((SECONDS - begin))
        [ "$seconds" -ge $((told + beat)) ] || continue
        told=$seconds
        printf -v line '%d:%02d %s: %s' $((seconds / 60)) $((seconds % 60)) "$name" "$said"
        # shellcheck disable=SC2059
        printf "${start}setup: %s$end" "${line:0:71}" >&2
    done
    printf '%s' "$rest" >>"$log"
    # shellcheck disable=SC2059
    printf "$start" >&2
}

# A line of pip in short.
libddp_trim() {
    local line=${1#"${1%%[![:space:]]*}"}
    line=${line%: started}
    line=${line%: still running...}
    printf '%s' "${line% (from *}"
}

# Changes whenever an installation made earlier would not be what an installation now would give.
libddp_state() {
    local root=$1 venv=$2
    {
        cd "$root" && find CMakeLists.txt pyproject.toml libddp bindings python -type f \
            ! -name '*.pyc' ! -name '*.so' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
        "$venv/bin/python" -c 'import sys
from importlib.metadata import PackageNotFoundError, version
print(sys.version)
for name in ("libddp", "torch"):
    try:
        print(version(name))
    except PackageNotFoundError:
        print("no", name)'
    } | sha256sum
}

libddp_install() {
    local root=$1 venv=$2 extras=$3 what torch
    local stamp=$venv/.libddp-state has=$venv/.libddp-extras
    if [ "$(libddp_state "$root" "$venv")" != "$(cat "$stamp" 2>/dev/null)" ]; then
        libddp_system "$venv/bin/python" || return 1
        libddp_say "installing libddp[$extras] into $venv (a few minutes; torch too if missing)"
        rm -f "$stamp" "$has"
        torch=$(libddp_missing_torch "$venv/bin/python" "$root")
        [ -z "$torch" ] || libddp_pip "$venv" torch "$torch" || return 1
        what="${root}[$extras]"
    elif ! grep -qxF "$extras" "$has"; then
        libddp_say "adding packages for libddp[$extras] to $venv"
        what="libddp[$extras]" # by name: the library itself is there and need not be built again
    else
        return 0
    fi
    # Verbose, to see how far the build is.
    libddp_pip "$venv" libddp --verbose "$what" || return 1
    echo "$extras" >>"$has"
    libddp_state "$root" "$venv" >"$stamp"
    libddp_say "done"
}

libddp_setup() {
    local root venv=${LIBDDP_VENV:-} python=${PYTHON:-python3} options=()
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return 1
    : "${venv:=$root/.venv}"
    libddp_system_packages || return 1
    if [ ! -x "$venv/bin/python" ]; then
        libddp_system "$python" || return 1
        if libddp_has_torch "$python" "$root"; then options=(--system-site-packages); fi
        libddp_say "making the virtual environment $venv"
        "$python" -m venv ${options[@]+"${options[@]}"} "$venv" || return 1
    fi
    LIBDDP_VENV=$(cd "$venv" && pwd) || return 1
    export LIBDDP_VENV
    libddp_install "$root" "$LIBDDP_VENV" "${LIBDDP_EXTRAS:-examples}"
}

libddp_setup
