# Sourced by the scripts beside it: where things are. Run them through make, or with
# WEIGHTSYNC_VENV and WEIGHTSYNC_BUILD set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${WEIGHTSYNC_VENV:-.venv}
build=${WEIGHTSYNC_BUILD:-build}
# Some tools start others by name.
PATH=$PWD/$venv/bin:$PATH

say() { printf '\n== %s\n' "$*"; }
cxx_files() { find csrc -name '*.cpp' -o -name '*.h' | sort; }
folders() { for folder in "$@"; do if [ -d "$folder" ]; then echo "$folder"; fi; done; }
