# The scripts and what they need; a container trains as `./train_multigpu.sh` does, with its arguments.
#
#   docker build --tag lockstep .                                                            for CPUs
#   docker build --tag lockstep --build-arg BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime .    for NVIDIA's GPUs
#   docker run --rm --shm-size=8g --volume "$PWD/runs:/runs" lockstep 2 har --save-dir /runs/har      (--gpus all)
#
# `docker stop --time=180` stops a run with a checkpoint, and the same `docker run` resumes it.
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}
# Where torch comes from if the base has none, and what else tasks need, as names for pip: "av==18.1.0 pyarrow==26.0.1".
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=""
# Any user may run it: one without a name and a home, too.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp USER=lockstep
WORKDIR /lockstep
COPY requirements.txt ./
# hadolint ignore=SC2086
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -r requirements.txt $EXTRAS
COPY . .
RUN mkdir -p /runs && chown 1000:1000 /runs
USER 1000:1000
ENTRYPOINT ["./train_multigpu.sh"]
CMD ["har", "--save-dir", "/runs/har"]
