# SPDX-License-Identifier: Apache-2.0
"""Releases of vLLM that this package was tried with. Imports nothing of vLLM."""

KNOWN = ("0.32", "0.33")


def is_known(version: str) -> bool:
    """Whether a version, as 0.33.0 or 0.32.0+cpu, is of such a release."""
    return ".".join(version.split(".")[:2]) in KNOWN


def line_of(version: str) -> str:
    """For a version that is not known."""
    return "kvferry knows vLLM %s, and this is vLLM %s: install one of those, or a newer kvferry" % (
        " and ".join(KNOWN), version)
