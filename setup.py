"""Builds ``pyg_sar/_kernels.abi3.so`` with the torch that is installed; everything else stands in pyproject.toml.

The library uses torch's stable ABI and none of Python's, so that it serves every Python and every torch from 2.10 on.
``PYG_SAR_NO_KERNELS=1`` leaves it out, for machines without a C++ compiler.
"""

import os
from pathlib import Path
from typing import Any

from setuptools import setup


def extension() -> dict[str, Any]:
    """Return the native library, or nothing where it is not wanted."""
    if os.environ.get("PYG_SAR_NO_KERNELS") == "1":
        return {}
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    flags = ["-std=c++20", "-O2", "-ftree-vectorize", "-fopenmp-simd", "-ffp-contract=fast", "-fno-math-errno"]
    flags += ["-fno-trapping-math", "-fvisibility=hidden", "-g0"]
    flags += ["-DPy_LIMITED_API=0x030A0000", "-DTORCH_TARGET_VERSION=0x020A000000000000"]  # Python 3.10, torch 2.10
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
