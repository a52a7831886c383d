#!/usr/bin/env bash
# Builds attention.cpp against ggml, as .peers/ggml/attention at the root of the repository.
#
#     build.sh            installs the ggml of requirements.txt into .peers/ggml, and uses that
#     build.sh PREFIX     uses a ggml that is installed in PREFIX (PREFIX/include, PREFIX/lib or PREFIX/lib64)
#
# PYTHON and CXX name the interpreter whose pip installs ggml, and the compiler.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
output=$(cd "$here/../../.." && pwd)/.peers/ggml

install_ggml() {
    # Without the cache: pip may hold a wheel of this version that was built with other settings.
    "${PYTHON:-python3}" -m pip install --no-cache-dir --upgrade --target "$output" --requirement "$here/requirements.txt"
}

library_of() {
    local found
    for found in "$1"/lib64 "$1"/lib; do
        if compgen -G "$found/libggml-cpu.*" >/dev/null; then
            echo "$found"
            return
        fi
    done
    echo "no libggml-cpu in $1/lib64 or $1/lib" >&2
    return 1
}

mkdir -p "$output"
if [ $# -eq 0 ]; then
    install_ggml
    prefix=$output/libggml
else
    prefix=$(cd "$1" && pwd)
fi
library=$(library_of "$prefix")
"${CXX:-c++}" -std=c++17 -O2 -Wall -Wextra "$here/attention.cpp" -o "$output/attention" \
    -I"$prefix/include" -L"$library" -Wl,-rpath,"$library" -lggml-cpu -lggml-base
echo "$output/attention"
