# syntax=docker/dockerfile:1
# CPU:   docker build --tag trainwright .
# CUDA:  docker build --tag trainwright:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .
# torch's wheels contain the CUDA libraries; the host provides the driver and the NVIDIA Container Toolkit.
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
# torch.compile builds kernels with a C++ compiler at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# torch has a layer of its own: a change of trainwright does not download it again.
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "${TORCH_INDEX}" "torch==${TORCH}"

ARG EXTRAS=datasets,digits,tensorboard,transformers
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    set -- /wheels/*.whl \
    && pip install --no-cache-dir "trainwright[${EXTRAS}] @ file://$1"

# Runs write to the mounted folder with this user id.
ARG UID=1000
RUN useradd --create-home --uid "${UID}" trainwright \
    && install --directory --owner trainwright /work /home/trainwright/.config
USER ${UID}
WORKDIR /work
ENTRYPOINT ["trainwright"]
CMD ["--help"]
