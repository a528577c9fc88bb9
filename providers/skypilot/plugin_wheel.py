"""Builds the wheel of `providers/skypilot/plugin`, which goes into SkyPilot's own environment.

The wheel holds the package `gpubroker_skypilot` and the module `vastai_sdk`. The same code gives the same bytes.
"""

import base64
import hashlib
import zipfile
from pathlib import Path

from providers.skypilot.plugin.shared import PACKAGE, PLUGIN_FILES, PLUGIN_VERSION, SKY_VERSION

WHEEL_VERSION = f"{SKY_VERSION}+g{PLUGIN_VERSION}"
"""Version of SkyPilot, and the plugin's version as the local part."""
DIST_INFO = f"{PACKAGE}-{WHEEL_VERSION}.dist-info"
_METADATA = f"""\
Metadata-Version: 2.4
Name: gpubroker-skypilot
Version: {WHEEL_VERSION}
Summary: Plugin of gpubroker for the SkyPilot API server
License-Expression: Apache-2.0
Requires-Python: >=3.11
Requires-Dist: psutil
Requires-Dist: requests
Requires-Dist: skypilot=={SKY_VERSION}
"""
_WHEEL = "Wheel-Version: 1.0\nGenerator: gpubroker\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_VAST = f"""\
\"\"\"Vast.ai's API as SkyPilot calls it; see `{PACKAGE}.vastai_sdk`.\"\"\"

from {PACKAGE}.vastai_sdk import VastAI as VastAI
"""


def write_wheel(folder: Path) -> Path:
    """Write the wheel into `folder` and return its path."""
    files = {f"{PACKAGE}/{name}": content for name, content in PLUGIN_FILES.items()}
    files |= {"vastai_sdk.py": _VAST.encode()}
    files |= {f"{DIST_INFO}/METADATA": _METADATA.encode(), f"{DIST_INFO}/WHEEL": _WHEEL.encode()}
    record = [f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items()]
    files[f"{DIST_INFO}/RECORD"] = "".join([*record, f"{DIST_INFO}/RECORD,,\n"]).encode()
    path = folder / f"{PACKAGE}-{WHEEL_VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return path


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
