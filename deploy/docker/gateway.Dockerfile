# The SMG gateway: docker build -f deploy/docker/gateway.Dockerfile -t ringplan-gateway:0.1.0 .
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/smg
WORKDIR /src
COPY constraints.txt ./
RUN /opt/smg/bin/pip install --no-cache-dir -c constraints.txt smg

FROM ${PYTHON_IMAGE}
RUN groupadd --gid 10001 ringplan \
    && useradd --uid 10001 --gid ringplan --no-create-home --home-dir /tmp ringplan
COPY --from=build /opt/smg /opt/smg
ENV PATH=/opt/smg/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 30000 29000
ENTRYPOINT ["smg"]
CMD ["launch", "--help"]
