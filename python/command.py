#!python
# SPDX-License-Identifier: Apache-2.0
"""The kvferry command of a wheel: becomes the program beside the library. Imports nothing of the package, which
would load the library and NumPy."""
import importlib.util
import os
import sys
import sysconfig

package = os.path.dirname(importlib.util.find_spec("kvferry").origin)
for place in os.path.dirname(package), sysconfig.get_path("platlib"):
    command = os.path.join(place, ".kvferry.mesonpy.libs", "kvferry")
    if os.path.exists(command):
        os.execv(command, ["kvferry", *sys.argv[1:]])
sys.exit("kvferry: the command is not where this package was installed: install it again with pip")
