# The CUDA compiler from wheels, where the system has none. Sourced after setup.sh.
# shellcheck shell=bash

# Whether a toolkit can build the backend: CUDA 13 with the headers of cuBLAS and of NCCL (cmake/Cuda.cmake asks for the same).
fits_cuda() { # root
    local release
    [ -e "$1/include/cublasLt.h" ] || return 1
    [ -e "$1/include/nccl.h" ] || [ -e /usr/include/nccl.h ] || return 1
    release=$("$1/bin/nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
    [ -n "$release" ] && [ "$release" -ge 13 ]
}

# Prints the root of a CUDA toolkit: that of CUDA_HOME or of nvcc on the PATH, if it fits, else one made of wheels in the cache.
cached_cuda() {
    local python root nvcc
    nvcc=${CUDA_HOME:+$CUDA_HOME/bin/nvcc}
    [ -n "$nvcc" ] || nvcc=$(command -v nvcc) || nvcc=
    if [ -n "$nvcc" ]; then
        root=$(dirname "$(dirname "$(readlink -m "$nvcc")")")
        if fits_cuda "$root"; then
            printf '%s\n' "$root"
            return
        fi
        say "$root is no CUDA 13 with cublasLt.h and nccl.h: the one from wheels is taken" >&2
    fi
    python=$(cached_venv venv-cuda tools/requirements-cuda.txt)
    root=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cu13
    # CMake and nvcc.profile look for lib64 and for the names without a version.
    [ -e "$root/lib64" ] || ln -s lib "$root/lib64"
    [ -e "$root/lib/libcudart.so" ] || ln -s libcudart.so.13 "$root/lib/libcudart.so"
    printf '%s\n' "$root"
}
