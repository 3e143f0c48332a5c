# Image for NVIDIA GPUs, without a CUDA toolkit: docker build -f deploy/cuda.Dockerfile -t minisgl:cuda .
# Then: docker run --rm --gpus all --ipc host -p 127.0.0.1:1919:1919 -v models:/home/minisgl/.cache minisgl:cuda \
#           --model Qwen/Qwen3-8B
# The host has a driver of version 580 or later and the NVIDIA Container Toolkit; NVRTC, which compiles the kernels at the
# first start, is a package. Never built by Docker; scripts/run-dockerfile has run its steps, without a GPU.
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY csrc csrc
COPY docs docs
COPY python python
RUN python -m venv /opt/minisgl
# The versions that were run on GPUs (docs/install.md).
RUN /opt/minisgl/bin/pip install --no-cache-dir ".[cuda,otel]" torch==2.11.0 sglang-kernel==0.4.5 flashinfer-python==0.6.14

FROM python:3.12-slim
COPY --from=build /opt/minisgl /opt/minisgl
# Models and compiled kernels are kept below the home folder: mount a volume at /home/minisgl/.cache.
RUN install -d -o 1000 -g 1000 /home/minisgl/.cache
ENV HOME=/home/minisgl USER=minisgl PATH=/opt/minisgl/bin:$PATH
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /home/minisgl
EXPOSE 1919
# A stop gives running requests --shutdown-timeout seconds (25): docker stop --time 30.
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=600s --interval=10s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:1919/health')"]
ENTRYPOINT ["minisgl", "--host", "0.0.0.0"]
CMD ["--model", "demo"]
