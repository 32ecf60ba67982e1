"""Builds ``pyg_sar/_kernels.abi3.so`` against the torch that is installed; everything else stands in pyproject.toml."""

import os
import platform
from pathlib import Path
from typing import Any

from setuptools import setup

os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2))


def extension() -> dict[str, Any]:
    """Return the native library, or nothing where it is not wanted or cannot be built: PyTorch then does the work."""
    if os.environ.get("PYG_SAR_NO_KERNELS") == "1":
        return {}
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    flags = ["-std=c++20", "-O3", "-fopenmp-simd", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-g0",
             "-fvisibility=hidden", "-DPy_LIMITED_API=0x030A0000", "-DTORCH_TARGET_VERSION=0x020A000000000000"]  # fmt: skip
    sources = sorted(path.as_posix() for path in Path("pyg_sar/csrc").glob("*.cpp"))
    module = CppExtension(
        "pyg_sar._kernels", sources, extra_compile_args=flags, py_limited_api=True,
        depends=[path.as_posix() for path in Path("pyg_sar/csrc").glob("*")],
    )  # fmt: skip
    return {
        "ext_modules": [module],
        "cmdclass": {"build_ext": BuildExtension},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(**extension())
