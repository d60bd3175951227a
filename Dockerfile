# CPU:   docker build --build-arg TORCH_CPU_INDEX=ADDRESS -t sciftune .   (the index of torch's builds without CUDA)
#        docker run --rm -v "$PWD/runs:/home/sciftune/project/runs" sciftune
# CUDA:  docker build --build-arg BASE=nvidia/cuda:VERSION-devel-ubuntu24.04 -t sciftune:cuda .
#        docker run --rm --gpus all --ipc host sciftune:cuda scripts/run model=klein ...
# The user is 1001: a mounted folder must be writable for it (or add --user).
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# A compiler for torch.compile; Python where the base has none
RUN apt-get update \
    && packages="ca-certificates g++ git" \
    && if ! command -v python3 > /dev/null; then packages+=" python3-dev python3-venv"; fi \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $packages \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1001 sciftune \
    && mkdir /home/sciftune/project \
    && chown sciftune: /home/sciftune/project
USER sciftune
WORKDIR /home/sciftune/project
ENV PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
COPY --chown=sciftune . .

# As scripts/run would at its first use; without the address, torch comes with CUDA
ARG TORCH_CPU_INDEX=
RUN if [[ -n $TORCH_CPU_INDEX ]]; then \
      export PIP_EXTRA_INDEX_URL=$TORCH_CPU_INDEX; \
      export UV_EXTRA_INDEX_URL=$PIP_EXTRA_INDEX_URL UV_INDEX_STRATEGY=unsafe-best-match; \
    fi; \
    . scripts/setup && mkdir -p runs
ENV PATH=/home/sciftune/project/.venv/bin:$PATH
CMD ["scripts/run"]
