# moe in a container, for CPUs (the default target) or CUDA:
#   docker build -t moe .
#   docker build -t moe:cuda --target cuda .
#   docker build -t moe:parallel --target parallel .    ranks on several machines, with DeepSpeed
#   docker run -p 127.0.0.1:8000:8000 -v moe-models:/models moe run MODEL --yes --host 0.0.0.0
# Downloads and converted stores go to the volume. Without MOE_API_KEY everybody who reaches the
# port may ask; the line above lets only this machine.

FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN make wheel

FROM python:3.12-slim-bookworm AS base
ENV HF_HOME=/models/hub \
    XDG_CACHE_HOME=/models/cache \
    PYTHONUNBUFFERED=1
RUN useradd --uid 10001 --create-home moe \
    && install -d -o moe -g moe /models
VOLUME /models
WORKDIR /home/moe
EXPOSE 8000
# A model is loaded before the server answers.
HEALTHCHECK --interval=30s --timeout=5s --start-period=10m \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["moe"]
CMD ["--help"]

# Run with `--gpus all`. Triton compiles its launchers with gcc.
FROM base AS cuda
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/src/dist,target=/dist \
    pip install --no-cache-dir torch==2.13.0 "triton>=3.4" "gguf>=0.18" /dist/*.whl
USER 10001

FROM base AS packages
RUN pip install --no-cache-dir torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/src/dist,target=/dist \
    pip install --no-cache-dir "gguf>=0.18" /dist/*.whl

FROM packages AS parallel
# hadolint ignore=DL3013
RUN pip install --no-cache-dir setuptools wheel \
    && DS_BUILD_OPS=0 pip install --no-cache-dir --no-build-isolation \
        "deepspeed>=0.18" "scipy>=1.12"
USER 10001

FROM packages AS cpu
USER 10001
