#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# with_numpy.sh SCRIPT ARG...: run a Python script with the first interpreter that has NumPy.
#
# Knows two: python3 of the PATH, and the distribution's. Without NumPy it skips with 77.
for python in python3 /usr/bin/python3; do
    if "$python" -c 'import numpy' 2>/dev/null; then
        exec "$python" "$@"
    fi
done
echo "skipped: neither python3 nor /usr/bin/python3 has NumPy (package python3-numpy)"
exit 77
