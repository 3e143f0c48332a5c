# Image for CPUs: docker build -f deploy/cpu.Dockerfile -t minisgl:cpu .
# Then: docker run --rm -p 127.0.0.1:1919:1919 minisgl:cpu   (the demo model; or with flags: --model Qwen/Qwen3-0.6B ...)
# Never built by Docker; scripts/run-dockerfile has run its steps.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY csrc csrc
COPY docs docs
COPY python python
RUN python -m venv /opt/minisgl
# PyTorch's own index has a torch without PyPI's 3 GB of CUDA. The extra otel is small: traces are of use in clusters.
RUN /opt/minisgl/bin/pip install --no-cache-dir -c constraints.txt ".[otel]" \
    --extra-index-url https://download.pytorch.org/whl/cpu

FROM python:3.11-slim
# The kernel of csrc/int4_cpu.cpp is compiled at the first start; without a compiler torch's slower one takes its place.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/minisgl /opt/minisgl
# Models and compiled kernels are kept below the home folder: mount a volume at /home/minisgl/.cache.
RUN install -d -o 1000 -g 1000 /home/minisgl/.cache
ENV HOME=/home/minisgl USER=minisgl PATH=/opt/minisgl/bin:$PATH
USER 1000:1000
WORKDIR /home/minisgl
EXPOSE 1919
# A stop gives running requests --shutdown-timeout seconds (25): docker stop --time 30.
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=600s --interval=10s CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:1919/health')"]
ENTRYPOINT ["minisgl", "--host", "0.0.0.0"]
CMD ["--model", "demo"]
