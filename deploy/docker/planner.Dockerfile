# The planner: no torch. From the repository's root: docker build -f deploy/docker/planner.Dockerfile -t ringplan-planner:0.1.0 .
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/ringplan
WORKDIR /src
COPY pyproject.toml constraints.txt ./
COPY deploy/docker/list_requirements.py deploy/docker/
RUN python deploy/docker/list_requirements.py pyproject.toml > requirements.txt \
    && /opt/ringplan/bin/pip install --no-cache-dir -c constraints.txt -r requirements.txt
COPY README.md LICENSE ./
COPY planner_service planner_service
COPY engine_service engine_service
COPY ringplan_cli ringplan_cli
COPY protos protos
RUN /opt/ringplan/bin/pip install --no-cache-dir --no-deps .

FROM ${PYTHON_IMAGE}
RUN groupadd --gid 10001 ringplan \
    && useradd --uid 10001 --gid ringplan --no-create-home --home-dir /tmp ringplan \
    && install -d -o ringplan -g ringplan -m 0700 /run/ringplan /captures
COPY --from=build /opt/ringplan /opt/ringplan
# Bytecode was made when the packages were installed; the root file system may be read-only.
ENV PATH=/opt/ringplan/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    RINGPLAN_PLANNER_SOCKET=/run/ringplan/planner.sock \
    RINGPLAN_PLANNER_RING_DIR=/run/ringplan/ring \
    RINGPLAN_PLANNER_CAPTURE_DIR=/captures \
    RINGPLAN_PLANNER_METRICS_HOST=0.0.0.0
USER 10001:10001
EXPOSE 9464
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s \
    CMD ["ringplan", "health", "unix:/run/ringplan/planner.sock"]
ENTRYPOINT ["ringplan"]
CMD ["planner"]
