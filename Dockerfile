# docker build -t maestrale .                          for NVIDIA GPUs
# docker build -t maestrale --build-arg EXTRA=cpu .    for CPUs
# docker run --gpus all --ipc=host -v "$PWD/runs:/app/runs" maestrale \
#     python -m trainer configs/quickstart.toml
FROM python:3.11-slim-bookworm
ARG EXTRA=cuda

# g++ : torch.compile and Triton build small kernels at run time
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 make \
    && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir uv

WORKDIR /app
ENV VIRTUAL_ENV=/opt/maestrale PATH=/opt/maestrale/bin:$PATH \
    OMP_NUM_THREADS=1 GLIBC_TUNABLES=glibc.malloc.hugetlb=1 PYTHONUNBUFFERED=1
RUN uv venv "$VIRTUAL_ENV"

COPY pyproject.toml overrides-cpu.txt README.md LICENSE ./
COPY shared shared
COPY verify verify
COPY environments environments
COPY rollout rollout
COPY trainer trainer
COPY serve serve
COPY dashboard dashboard
COPY evaluation evaluation
COPY curate curate
COPY lab lab
COPY examples examples
RUN if [ "$EXTRA" = cpu ]; then \
        uv pip install --no-cache --overrides overrides-cpu.txt --torch-backend cpu -e ".[cpu]"; \
    else \
        uv pip install --no-cache -e ".[$EXTRA]"; \
    fi
COPY configs configs

RUN useradd --create-home maestrale && mkdir -p runs models && chown maestrale runs models
USER maestrale
CMD ["python", "-m", "trainer", "configs/quickstart.toml"]
