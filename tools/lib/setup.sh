# Shared by tools/quickstart and tools/test. Sourced, never run; expects `set -eu` and $root.
# shellcheck shell=bash

# A step that fails inside $(...) ends the script too; else a venv that pip could not fill would get its stamp.
shopt -s inherit_errexit

say() { printf '==> %s\n' "$*"; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Where set-up keeps what it fetched or built from packages: wheels, servers, vocabularies, corpora.
export MOBULA_CACHE="${MOBULA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/mobula}"

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "installing packages needs root: run as root, or install sudo (missing: $*)"
    fi
}

# Package names of a list file for this release; "name:codename" lines count on that release only.
packages_of() {
    local codename line
    # shellcheck disable=SC1091
    codename=$(. /etc/os-release && printf '%s' "${VERSION_CODENAME:-}")
    while read -r line; do
        case $line in
        '' | '#'*) ;;
        *:*) if [ "${line#*:}" = "$codename" ]; then printf '%s\n' "${line%%:*}"; fi ;;
        *) printf '%s\n' "$line" ;;
        esac
    done <"$1"
}

# Install whatever of the given list files is missing, in one apt-get call.
install_packages() {
    command -v apt-get >/dev/null || die "this needs apt-get (Debian 12 or Ubuntu 24.04); see CONTRIBUTING.md for the package list"
    local missing=() name
    for name in $(for list in "$@"; do packages_of "$list"; done | sort -u); do
        if ! dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null | grep -q '^installed$'; then
            missing+=("$name")
        fi
    done
    if [ ${#missing[@]} -eq 0 ]; then
        return 0
    fi
    say "installing ${#missing[@]} packages: ${missing[*]}"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq
    # Tests start their own servers (redis-server, Slurm): installing one must not start the machine's.
    local policy=/usr/sbin/policy-rc.d made=0 failed=0
    if [ ! -e "$policy" ]; then
        made=1
        printf '#!/bin/sh\nexit 101\n' | as_root install -m 755 /dev/stdin "$policy"
    fi
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null || failed=1
    if [ "$made" = 1 ]; then as_root rm -f "$policy"; fi
    [ "$failed" = 0 ] || die "apt-get could not install: ${missing[*]}"
}

# A virtual environment in the cache, made once per (name, requirements): prints its python.
# The stamp is written last, so that an interrupted installation is made again, and it is the only one, so that going
# back to other requirements installs them again. Two that come at once wait for each other.
cached_venv() {
    local name=$1 requirements=$2 dir stamp
    dir=$MOBULA_CACHE/$name
    stamp=$dir/.requirements.$(sha256sum <"$requirements" | cut -c1-16)
    if [ ! -e "$stamp" ]; then
        mkdir -p "$dir"
        (
            flock 9
            if [ -e "$stamp" ]; then exit; fi
            say "installing $(basename "$requirements") into $dir" >&2
            rm -f "$dir"/.requirements.*
            python3 -m venv "$dir" >&2
            "$dir/bin/pip" install -q --disable-pip-version-check -r "$requirements" >&2
            : >"$stamp"
        ) 9>"$dir/.lock"
    fi
    printf '%s\n' "$dir/bin/python"
}

# An older megatron-core without what it needs, which is the torch environment's: a folder for PYTHONPATH.
cached_megatron() { # that environment's Python, version, more arguments of pip
    local python=$1 version=$2 dir=$MOBULA_CACHE/megatron-core-$2
    shift 2
    (
        flock 9
        if [ -e "$dir/.done" ]; then exit; fi
        say "installing megatron-core $version into $dir" >&2
        "$python" -m pip install -q --disable-pip-version-check --no-deps --upgrade --target "$dir" "$@" "megatron-core==$version" >&2
        : >"$dir/.done"
    ) 9>"$dir.lock"
}

# Configures and builds one preset, or one target of it. Quiet when it works; the whole output and the end of the
# script when it does not: programs of an earlier build must not pass for today's.
build_preset() { # preset, optional target
    local log=build/$1.build.log
    say "building the $1 preset"
    mkdir -p build
    if ! { cmake --preset "$1" && cmake --build --preset "$1" ${2:+--target "$2"}; } >"$log" 2>&1; then
        cat "$log" >&2
        die "the $1 preset does not build ($log)"
    fi
    tail -n 1 "$log"
}
