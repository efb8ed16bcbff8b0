#!/usr/bin/env bash
# Creates .venv and installs modelpool with its exact dependencies into it; does nothing if it is up to date.
# Usage: scripts/ensure_venv.sh [EXTRA ...]      extras of pyproject.toml, such as serve, s3, or dev for the tests; those
# that are installed stay. Needs Python 3.11+ with venv.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=.venv/bin/python
stamp=.venv/.installed

say() { printf '\n== %s\n' "$*" >&2; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    say "Found no Python 3.11 or newer with the venv module. Install one, or select one: PYTHON=python3.11 $0"
    return 1
}

# Prints a hash of everything an installation depends on: the required versions, this folder (the install points here)
# and the interpreter.
fingerprint() {
    "$python" - <<'PYTHON'
import hashlib, pathlib, sys
content = [pathlib.Path(name).read_bytes() for name in ("constraints.txt", "pyproject.toml")]
print(hashlib.sha256(b"\0".join([*content, bytes(pathlib.Path.cwd()), sys.version.encode()])).hexdigest())
PYTHON
}

mkdir -p .venv
if command -v flock >/dev/null; then # of two concurrent scripts, the second waits and then finds everything installed
    exec 9>.venv/.installing
    flock 9
fi

if ! "$python" -m pip --version >/dev/null 2>&1; then
    base="$(find_python)"
    say "Creating .venv with $("$base" --version)"
    "$base" -m venv .venv
fi

# Prints the names after those in the first argument, "serve,s3", without repetition; refuses unknown ones.
all_extras() {
    "$python" - "$@" <<'PYTHON'
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    known = tomllib.load(file)["project"].get("optional-dependencies", {})
before = [name for name in sys.argv[1].split(",") if name in known]
unknown = [name for name in sys.argv[2:] if name not in known]
if unknown:
    sys.exit(f"unknown extra {unknown[0]!r}. Known: {', '.join(known)}.")
print(",".join(sorted({*before, *sys.argv[2:]})) or "plain")
PYTHON
}

wanted="$(fingerprint)"
read -r stamped extras_before <<<"$(cat "$stamp" 2>/dev/null || true)"
extras="$(all_extras "${extras_before:-plain}" "$@")"
if [ "$stamped" = "$wanted" ] && [ "$extras_before" = "$extras" ]; then
    exit 0
fi

torch="$(grep '^torch==' constraints.txt)"
say "Installing $torch into .venv (large; the first time takes a while)"
"$python" -m pip install --disable-pip-version-check "$torch"

if [ "$extras" = plain ]; then target='.'; else target=".[$extras]"; fi
say "Installing modelpool ($extras) and the exact versions of constraints.txt into .venv"
"$python" -m pip install --disable-pip-version-check --constraint constraints.txt --editable "$target"
echo "$wanted $extras" >"$stamp"
