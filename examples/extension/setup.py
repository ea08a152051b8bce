"""Builds the operator: `pip install --no-build-isolation examples/extension`; with CUDA where there is nvcc."""

import os
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
from torch.version import cuda

HERE = Path(__file__).parent
SOURCES = ["src/swiglu/csrc/swiglu.cpp", "src/swiglu/csrc/module.cpp"]

os.chdir(HERE)  # setuptools takes its paths for relative to here, wherever this file is started from
# A wheel of torch for CPUs has no CUDA headers, nvcc or not.
with_cuda = cuda is not None and CUDA_HOME is not None and (Path(CUDA_HOME) / "bin" / "nvcc").exists()
extension = CUDAExtension if with_cuda else CppExtension

setup(
    name="swiglu",
    version="1.0",
    packages=["swiglu"],
    package_dir={"": "src"},  # not beside the task, where Python would find it without what is built
    install_requires=["torch"],
    ext_modules=[
        extension(
            "swiglu._C",
            [*SOURCES, "src/swiglu/csrc/swiglu.cu"] if with_cuda else SOURCES,
            extra_compile_args={"cxx": ["-O3", "-fopenmp"], "nvcc": ["-O3"]},
            extra_link_args=["-fopenmp"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
