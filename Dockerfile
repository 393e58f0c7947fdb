# The image holds the locked environment, the package and its vocabulary; nothing is fetched when it starts.
# Build:  docker build -t compaction-proxy .
# Run:    docker run --rm -p 127.0.0.1:8080:8080 -p 127.0.0.1:9464:9464 --read-only compaction-proxy

FROM python:3.13-slim-bookworm AS build
WORKDIR /opt/compaction-proxy
COPY deploy/requirements/run.txt ./
RUN python -m venv /opt/compaction-proxy/venv \
    && /opt/compaction-proxy/venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --require-hashes -r run.txt
COPY proxy ./proxy
COPY deploy/healthcheck.py ./
# Readable by anyone and compiled, for the file system is read-only later; and without its vocabulary an image never comes to be
RUN chmod -R a+rX proxy healthcheck.py \
    && venv/bin/python -m compileall -q proxy healthcheck.py \
    && venv/bin/python -c "import sys; from proxy import tokens; tokens.ruler('gpt-4o', {}).text('x'); sys.exit(any(tokens.degraded().values()))"

FROM python:3.13-slim-bookworm
LABEL org.opencontainers.image.title="compaction-proxy" \
      org.opencontainers.image.description="A transparent, OpenAI-compatible proxy that makes long conversations fit the model's context window." \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/compaction-proxy /opt/compaction-proxy
WORKDIR /opt/compaction-proxy
# For a store on disk (sqlite:////var/lib/compaction-proxy/checkpoints.db): a volume that is mounted here takes over its owner
RUN install -d -m 0700 -o 10001 -g 10001 /var/lib/compaction-proxy
# The state directory of several workers is the one above.
# In a container loopback is nobody's: which of the two ports is reachable from outside is for whoever runs it to say
ENV COMPACTION_SERVER__HOST=0.0.0.0 \
    COMPACTION_SERVER__ADMIN_HOST=0.0.0.0 \
    COMPACTION_LOG__FORMAT=json \
    XDG_STATE_HOME=/var/lib \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
EXPOSE 8080 9464
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 \
    CMD ["/opt/compaction-proxy/venv/bin/python", "healthcheck.py"]
ENTRYPOINT ["/opt/compaction-proxy/venv/bin/python", "-m", "proxy"]
CMD ["serve"]
