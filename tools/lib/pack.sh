# Trees of programs that carry their libraries, for tools/pack and tools/gpu-bundle. Sourced after setup.sh.
# shellcheck shell=bash

programs=(mobula mobula-agent mobula-init mobula-unpack mobula-worker)

# For the linker: DT_RPATH counts for the libraries' own needs too; DT_RUNPATH would not.
# shellcheck disable=SC2034
rpath_flags=-Wl,--disable-new-dtags

# Prints the loader that this machine's programs name.
own_loader() {
    local loader
    loader=$(readelf -l /bin/sh | sed -n 's/.*interpreter: \(.*\)]/\1/p')
    [ -e "$loader" ] || die "/bin/sh names no loader"
    printf '%s\n' "$loader"
}

# Prints the libraries that files take. A loader is asked itself, since ldd(1) takes its own.
needs_of() { # loader file...
    local loader=$1 file all=
    for file in "${@:2}"; do all+=$("$loader" --list "$file")$'\n'; done
    awk '$2 == "=>" {print $3}' <<<"$all" | sort -u
}

# Programs, backends, and the libraries of both but those that match: DIR/bin and DIR/lib, which are there.
pack_tree() { # build dir [regular-expression]
    local build=$1 dir=$2 except="^$2/${3:+|$3}" name library blas libraries
    for name in "${programs[@]}"; do
        strip -o "$dir/bin/$name" "$build/bin/$name"
    done
    for library in "$build"/lib/libmobula_*.so; do
        strip --strip-unneeded -o "$dir/lib/${library##*/}" "$library"
    done
    # The CPU backend opens OpenBLAS by its name.
    blas=$(ldconfig -p | awk '$1 == "libopenblas.so.0" {print $NF; exit}')
    [ -n "$blas" ] || die "libopenblas.so.0 is not installed"
    cp -L "$blas" "$dir/lib/libopenblas.so.0"
    libraries=$(needs_of "$(own_loader)" "${programs[@]/#/$build/bin/}" "$build"/lib/libmobula_*.so "$blas")
    for library in $libraries; do
        if ! [[ $library =~ $except ]]; then cp -L "$library" "$dir/lib/${library##*/}"; fi
    done
}

# This machine has all libraries anyway: only the tree's own must count, and those that match.
check_tree() { # loader dir [regular-expression]
    local loader=$1 dir=$2 except="^$2/${3:+|$3}" name needs
    for name in "${programs[@]}"; do
        needs=$(needs_of "$loader" "$dir/bin/$name")
        if printf '%s\n' "$needs" | grep -vE "$except|^$"; then
            die "$name takes the libraries above from outside of $dir"
        fi
    done
}
