# The engine on an NVIDIA GPU. From the repository's root:
# docker build -f deploy/docker/engine-cuda.Dockerfile -t ringplan-engine-cuda:0.1.0 .
# The base image has the CUDA compiler, which FlashInfer needs at run time, for the CUDA version of pip's build of torch.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04@sha256:7d2f6a8c2071d911524f95061a0db363e24d27aa51ec831fcccf9e76eb72bc92

FROM ${CUDA_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12-venv=3.12.3-* \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/ringplan
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY deploy/docker/list_requirements.py deploy/docker/constraints-cuda.txt deploy/docker/
RUN /opt/ringplan/bin/python deploy/docker/list_requirements.py pyproject.toml cuda smg > requirements.txt \
    && /opt/ringplan/bin/pip install --no-cache-dir -c constraints.txt -c deploy/docker/constraints-cuda.txt -r requirements.txt
COPY README.md LICENSE ./
COPY planner_service planner_service
COPY engine_service engine_service
COPY ringplan_cli ringplan_cli
COPY protos protos
RUN /opt/ringplan/bin/pip install --no-cache-dir --no-deps .

FROM ${CUDA_IMAGE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.12=3.12.3-* python3.12-dev=3.12.3-* \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 ringplan \
    && useradd --uid 10001 --gid ringplan --no-create-home --home-dir /tmp ringplan \
    && install -d -o ringplan -g ringplan -m 0700 /run/ringplan
COPY --from=build /opt/ringplan /opt/ringplan
# Bytecode was made when the packages were installed; the root file system may be read-only. FlashInfer compiles kernels when
# they are first used, and keeps them under HOME.
ENV PATH=/opt/ringplan/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    RINGPLAN_ENGINE_MODEL=/model \
    RINGPLAN_ENGINE_LISTEN=0.0.0.0:50051 \
    RINGPLAN_ENGINE_PLANNER=unix:/run/ringplan/planner.sock \
    RINGPLAN_ENGINE_METRICS_HOST=0.0.0.0
USER 10001:10001
EXPOSE 50051 9465
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m \
    CMD ["ringplan", "health", "127.0.0.1:50051"]
ENTRYPOINT ["ringplan"]
CMD ["engine"]
