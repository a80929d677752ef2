#!/bin/sh
# Make .venv ready: find a Python, create the environment, install requirements.txt.
# Says in one sentence what is missing. Called by the Makefile; $1 may name a Python.

say() { echo "$*" >&2; exit 1; }
fits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; }

if [ -n "$1" ]; then
    fits "$1" || say "$1 is not a Python from 3.10 to 3.13."
    python=$1
else
    for name in python3 python3.13 python3.12 python3.11 python3.10; do
        if fits "$name"; then python=$name; break; fi
    done
fi
[ -n "$python" ] || say "No Python from 3.10 to 3.13 found: install one, or name it with 'make PYTHON=/path/to/python'."

if ! fits .venv/bin/python; then
    version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        say "$version cannot create environments: on Debian or Ubuntu, 'sudo apt install $version-venv'."
    echo "Creating .venv with $version."
    rm -rf .venv
    "$python" -m venv .venv || say "$version could not create .venv."
fi

echo "Installing requirements.txt into .venv (a few minutes the first time)."
.venv/bin/python -m pip install --retries 2 -r requirements.txt >.venv/install.log 2>&1 || {
    grep '^ERROR' .venv/install.log | tail -n 1 >&2
    say "Installing failed; is there a network? The whole story is in .venv/install.log."
}
touch .venv/installed
