#!/usr/bin/env bash
# Install nvcc and what CMake needs with it from NVIDIA's wheels: install_nvcc.sh FOLDER
# For machines without the CUDA toolkit: a build container, or CI.
set -euo pipefail
folder=${1:?expected a folder}
version=13.0.*
python=$(command -v python3.11 || command -v python3)
"$python" -m pip install -q --no-deps --target "$folder-wheels" "nvidia-cuda-nvcc==$version" \
  "nvidia-cuda-crt==$version" "nvidia-nvvm==$version" "nvidia-cuda-runtime==$version" \
  "nvidia-cuda-cccl==$version"
ln -sfn lib "$folder-wheels/nvidia/cu13/lib64"  # where nvcc looks
ln -sf libcudart.so.13 "$folder-wheels/nvidia/cu13/lib/libcudart.so"  # where CMake looks
ln -sfn "$folder-wheels/nvidia/cu13" "$folder"
"$folder/bin/nvcc" --version
