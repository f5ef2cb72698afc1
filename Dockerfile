# docker build -t maestrale .                               trains, on NVIDIA GPUs
# docker build -t maestrale --build-arg EXTRA=cpu .         trains, on CPUs
# docker build -t maestrale-serve --target=serve .          serves
# docker run --gpus all --ipc=host -v "$PWD/runs:/app/runs" maestrale \
#     python -m trainer configs/quickstart.toml
# docker run --gpus all --ipc=host -v "$PWD/runs:/app/runs:ro" -p 8000:8000 -e MAESTRALE_API_KEY=... maestrale-serve \
#     python -m serve --model runs/quickstart/latest
# BASE has `python` (3.11 or 3.12) with venv and pip, and apt. Folders of wheels are passed on as for `make`:
# --build-arg PIP_FIND_LINKS=/wheels with that folder mounted. --build-arg LOCKED=1 installs the packages of locks/ by
# their hashes, and --sbom=true --provenance=mode=max adds the list of what is inside (docker buildx)
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS installed
ARG EXTRA=cuda
ARG PIP_FIND_LINKS=
ARG LOCKED=

# g++ : torch.compile and Triton build small kernels at run time
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /app
ENV VIRTUAL_ENV=/opt/maestrale PATH=/opt/maestrale/bin:$PATH \
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 PYTHONUNBUFFERED=1

COPY Makefile pyproject.toml overrides-cpu.txt README.md LICENSE ./
COPY locks locks
COPY shared shared
COPY verify verify
COPY environments environments
COPY rollout rollout
COPY trainer trainer
COPY serve serve
COPY dashboard dashboard
COPY evaluation evaluation
COPY oversight oversight
COPY curate curate
COPY lab lab
COPY maestrale maestrale
COPY examples examples
RUN UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 make install VENV="$VIRTUAL_ENV" EXTRA="$EXTRA" PYTHON=python LOCKED="$LOCKED"
COPY configs configs

RUN useradd --create-home maestrale && mkdir -p runs models && chown maestrale runs models
USER maestrale

FROM installed AS serve
ENV MAESTRALE_HOST=0.0.0.0
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s \
    CMD ["python", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
CMD ["python", "-m", "serve", "--model", "runs/quickstart/latest"]

FROM installed
CMD ["python", "-m", "trainer", "configs/quickstart.toml"]
