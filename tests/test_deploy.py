"""Deployment: every file that is handed out is valid, safe by default, and does what it says."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy import config

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS = sorted(path for path in (DEPLOY / "kubernetes").rglob("*.yaml") if path.name != "kustomization.yaml")
OBJECTS: list[dict[str, Any]] = [one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text())]
USER = 10_001
WORKLOADS = [one for one in OBJECTS if one["kind"] == "Deployment"]


def program(name: str) -> str:
    """A program of the environment or the system; skips the test where it is missing."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def passes(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@dataclass(frozen=True)
class Instruction:
    word: str
    rest: str
    stage: int


def instructions() -> list[Instruction]:
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found: list[Instruction] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        stage = sum(one.word == "FROM" for one in found) + (word == "FROM")
        found.append(Instruction(word, rest.strip(), stage))
    return found


def of(word: str, stage: int = 2) -> list[str]:
    return [one.rest for one in instructions() if one.word == word and one.stage == stage]


# --- the image ------------------------------------------------------------------------------------------------------


def test_the_image_is_slim_and_runs_as_a_numbered_user_without_rights() -> None:
    assert [one.rest for one in instructions() if one.word == "FROM"] == [
        "python:3.13-slim-bookworm AS build",
        "python:3.13-slim-bookworm",
    ]
    assert of("USER") == ["10001:10001"]
    assert of("EXPOSE") == ["8080 9464"]
    assert of("ENTRYPOINT") == ['["/opt/compaction-proxy/venv/bin/python", "-m", "proxy"]']
    assert of("CMD") == ['["serve"]']


def test_the_image_installs_only_what_the_lock_names_by_hash() -> None:
    installs = [one.rest for one in instructions() if one.word == "RUN" and "pip install" in one.rest]

    assert len(installs) == 1
    assert "--require-hashes -r run.txt" in installs[0]


def test_the_health_check_asks_the_admin_port() -> None:
    (check,) = of("HEALTHCHECK")

    assert check.endswith('CMD ["/opt/compaction-proxy/venv/bin/python", "healthcheck.py"]')
    assert '"/healthz"' in (DEPLOY / "healthcheck.py").read_text()


def test_all_that_the_image_is_made_of_reaches_the_builder_and_nothing_else() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [one.rest.split()[0] for one in instructions() if one.word == "COPY" and "--from" not in one.rest]

    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / path).exists() for path in copied)


def test_the_settings_of_the_image_are_settings() -> None:
    (given,) = of("ENV")
    environment = dict(pair.split("=", 1) for pair in given.split())

    loaded = config.load(environment={name: value for name, value in environment.items() if name.startswith("COMPACTION_")})

    assert loaded.server.host == "0.0.0.0"
    assert loaded.server.admin_host == "0.0.0.0"
    assert loaded.log.format == "json"


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    passes(program("hadolint"), "Dockerfile")


@pytest.fixture
def admin_port() -> Iterator[tuple[int, list[int]]]:
    """A server that answers `/healthz` with the status in the list."""
    status = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status[0] if self.path == "/healthz" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port, status
    server.shutdown()
    thread.join()
    server.server_close()


def healthy(port: int) -> int:
    environment = {"COMPACTION_SERVER__ADMIN_PORT": str(port), "http_proxy": "http://127.0.0.1:1"}
    return subprocess.run([sys.executable, DEPLOY / "healthcheck.py"], env=environment, check=False).returncode


def test_the_health_check_passes_only_while_the_process_is_up(admin_port: tuple[int, list[int]]) -> None:
    port, status = admin_port

    up = healthy(port)
    status[0] = 503
    down = healthy(port)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gone = healthy(unused.getsockname()[1])

    assert (up, down, gone) == (0, 1, 1)


def interpreter(folder: Path) -> Path:
    """This Python where anyone may run it: a copy of it when it lies in someone's home."""
    python = Path(sys.base_prefix) / f"bin/python{sys.version_info.major}.{sys.version_info.minor}"
    try:
        subprocess.run([python, "-c", "import venv"], user=USER, group=USER, extra_groups=(), check=True, capture_output=True)
    except (PermissionError, subprocess.CalledProcessError):
        heavy = shutil.ignore_patterns("test", "tests", "__pycache__", "share", "*.a")
        shutil.copytree(sys.base_prefix, folder, symlinks=True, ignore=heavy)
        return folder / python.relative_to(sys.base_prefix)
    return python


class Image:
    """The Dockerfile's instructions carried out below a folder, with its paths moved there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.python = interpreter(root / "python")
        self.workdir = root
        self.environment: dict[str, str] = {}

    def moved(self, text: str) -> str:
        return re.sub(r"(?<![\w.])/(opt|var/lib)/", lambda found: f"{self.root}/{found[1]}/", text)

    def build(self) -> None:
        for one in instructions():
            match one.word:
                case "WORKDIR":
                    self.workdir = Path(self.moved(one.rest + "/"))
                    self.workdir.mkdir(parents=True, exist_ok=True)
                case "COPY" if "--from" not in one.rest:
                    source, target = one.rest.split()
                    self.copy(ROOT / source, self.workdir / target)
                case "RUN":
                    passes("sh", "-c", self.moved(one.rest).replace("python -m venv", f"{self.python} -m venv"), cwd=self.workdir)
                case "ENV":
                    self.environment |= dict(pair.split("=", 1) for pair in one.rest.split())

    def copy(self, source: Path, target: Path) -> None:
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target / source.name if target.is_dir() else target)

    def command(self, word: str) -> list[str]:
        (rest,) = of(word)
        return [self.moved(part) for part in json.loads(rest[rest.index("[") :])]


IN_THE_BOX = """
import ctypes, fcntl, os, signal, socket, struct, subprocess, sys, time
entry, check, user, root = eval(sys.argv[1])
with socket.socket() as control:  # loopback is down in a new network namespace
    fcntl.ioctl(control, 0x8914, struct.pack("16sh", b"lo", 0x41) + bytes(16))
os.setgroups([]); os.setgid(user); os.setuid(user)
try:
    open(os.path.join(root, "new"), "w")
except OSError:
    print("read-only")
try:
    socket.create_connection(("192.0.2.1", 80), 1)
except OSError:
    print("no network")
started = time.monotonic()
server = subprocess.Popen(entry)
while subprocess.call(check) != 0 and server.poll() is None:
    time.sleep(0.05)
print("healthy", server.poll())
body = b'{"model":"gpt-4o","messages":[{"role":"user","content":"hello"}]}'
with socket.create_connection(("127.0.0.1", 8080)) as client:
    client.sendall(b"POST /v1/compact HTTP/1.1\\r\\nhost: a\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body)
    print("answered", client.recv(15)[9:12].decode())
server.send_signal(signal.SIGTERM)
print("ended", server.wait())
"""


@pytest.fixture
def anyones() -> Iterator[Path]:
    """A folder that any user may enter. pytest's own are closed to others again by whatever pytest starts next."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.service
@pytest.mark.timeout(900)
def test_the_images_own_commands_work_without_rights_without_network_and_read_only(anyones: Path) -> None:
    unshare = program("unshare")
    if os.geteuid() != 0 or subprocess.run([unshare, "--net", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("only root may take the network and the rights away")
    image = Image(anyones / "image")
    image.build()
    entry = image.command("ENTRYPOINT") + image.command("CMD")
    passes("chmod", "-R", "a-w", image.root)
    box = repr((entry, image.command("HEALTHCHECK"), USER, str(image.workdir)))

    done = subprocess.run(
        [unshare, "--net", image.python, "-I", "-c", IN_THE_BOX, box],
        cwd=image.workdir,
        env={"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(image.python.parents[1] / "lib"), **image.environment},
        capture_output=True,
        text=True,
        check=False,
    )

    told = done.stdout.splitlines()
    for line in ("read-only", "no network", "healthy None", "answered 200", "ended 0"):
        assert line in told, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


# --- compose --------------------------------------------------------------------------------------------------------


def test_compose_keeps_to_its_schema() -> None:
    passes(program("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")


def test_compose_brings_the_three_and_binds_them_to_this_machine() -> None:
    assert list(COMPOSE["services"]) == ["compaction-proxy", "prometheus", "grafana"]
    ports = [port for service in COMPOSE["services"].values() for port in service["ports"]]
    assert ports == [f"127.0.0.1:{port}:{port}" for port in (8080, 9464, 9090, 3000)]


def test_compose_gives_the_proxy_nothing_to_write_but_its_checkpoints() -> None:
    service = COMPOSE["services"]["compaction-proxy"]

    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["volumes"] == ["checkpoints:/var/lib/compaction-proxy"]
    assert int(service["stop_grace_period"].rstrip("s")) > 30
    loaded = config.load(environment={"COMPACTION_STORE": service["environment"]["COMPACTION_STORE"]})
    assert loaded.store.url == "sqlite:////var/lib/compaction-proxy/checkpoints.db"


def test_every_file_that_compose_mounts_is_there_and_is_where_grafana_looks() -> None:
    mounts = [
        mount.split(":") for service in COMPOSE["services"].values() for mount in service["volumes"] if mount.startswith(".")
    ]
    provider = yaml.safe_load((ROOT / "grafana/provisioning/dashboards/compaction-proxy.yaml").read_text())["providers"][0]

    for source, _, mode in mounts:
        assert (DEPLOY / source).is_dir()
        assert mode == "ro"
    assert provider["options"]["path"] in [target for _, target, _ in mounts]
    home = COMPOSE["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == provider["options"]["path"] + "/overview.json"


def test_prometheus_scrapes_the_proxy_under_the_name_that_compose_gives_it() -> None:
    scrapes = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    source = yaml.safe_load((ROOT / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"][0]

    assert scrapes[0]["static_configs"] == [{"targets": ["compaction-proxy:9464"]}]
    assert source["url"] == "http://prometheus:9090"


# --- Kubernetes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [path for path in MANIFESTS if path.name != "servicemonitor.yaml"], ids=lambda path: path.name)
def test_a_manifest_keeps_to_its_schema(path: Path) -> None:
    told = passes(program("kubernetes-validate"), "--strict", path)

    assert "WARN" not in told


def test_kustomize_takes_all_manifests_but_those_that_need_an_operator() -> None:
    listed = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text())["resources"]

    assert sorted(listed) == sorted(path.name for path in MANIFESTS if path.parent.name == "kubernetes")


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one["metadata"]["name"])
def test_a_workload_runs_without_rights_on_a_read_only_file_system(workload: dict[str, Any]) -> None:
    pod = workload["spec"]["template"]["spec"]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
        assert container["readinessProbe"]


def test_everything_that_selects_pods_selects_some() -> None:
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in WORKLOADS]
    for one in OBJECTS:
        selector = one.get("spec", {}).get("selector") or one.get("spec", {}).get("podSelector")
        if selector is not None:
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= labels.items() for labels in pods), one["metadata"]["name"]


def test_a_pod_drains_before_it_is_killed_and_is_ready_only_when_it_says_so() -> None:
    proxy = next(one for one in WORKLOADS if one["metadata"]["name"] == "compaction-proxy")
    pod = proxy["spec"]["template"]["spec"]
    (container,) = pod["containers"]

    sleep = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > sleep + config.Server().drain_timeout
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "admin"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "admin"}
    assert proxy["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_the_configuration_in_the_cluster_is_one_that_starts(tmp_path: Path) -> None:
    data = next(one for one in OBJECTS if one["kind"] == "ConfigMap")["data"]
    file = tmp_path / "compaction-proxy.yaml"
    file.write_text(data["compaction-proxy.yaml"])

    loaded = config.load(environment={}, file=str(file))

    assert loaded.store.url == "redis://compaction-proxy-redis:6379/0"


def test_there_are_always_two_and_never_none() -> None:
    by_kind = {one["kind"]: one for one in OBJECTS}

    assert by_kind["PodDisruptionBudget"]["spec"]["minAvailable"] == 1
    assert by_kind["HorizontalPodAutoscaler"]["spec"]["minReplicas"] == 2
    assert by_kind["HorizontalPodAutoscaler"]["spec"]["metrics"][0]["pods"]["metric"]["name"] == "compaction_inflight_requests"
    assert by_kind["ServiceMonitor"]["spec"]["endpoints"] == [{"port": "admin", "path": "/metrics", "interval": "15s"}]


# --- systemd and the fronts -----------------------------------------------------------------------------------------


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd/compaction-proxy.service").read_text()
    (tmp_path / "compaction-proxy.service").write_text(re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", unit, flags=re.M))

    told = passes(program("systemd-analyze"), "verify", "--man=no", tmp_path / "compaction-proxy.service")

    assert "compaction-proxy.service" not in told


def test_the_unit_gives_the_drain_its_time() -> None:
    unit = (DEPLOY / "systemd/compaction-proxy.service").read_text()

    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, flags=re.M)
    assert int(seconds) > config.Server().drain_timeout


def certificate(folder: Path) -> None:
    passes(
        *(program("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=llm.example.com", "-days", "2"),
        *("-keyout", folder / "privkey.pem", "-out", folder / "fullchain.pem"),
    )


def test_nginx_understands_its_configuration(tmp_path: Path) -> None:
    nginx = program("nginx")
    certificate(tmp_path)
    text = (DEPLOY / "fronts/nginx.conf").read_text().replace("/etc/nginx/tls", str(tmp_path))
    (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/nginx.pid;\n{text}")

    passes(nginx, "-t", "-e", tmp_path / "error.log", "-c", tmp_path / "nginx.conf")


def test_caddy_understands_its_configuration() -> None:
    passes(program("caddy"), "validate", "--adapter", "caddyfile", "--config", DEPLOY / "fronts/Caddyfile")


def test_envoy_understands_its_configuration() -> None:
    passes(program("envoy"), "--mode", "validate", "-c", DEPLOY / "fronts/envoy.yaml")


def test_no_front_buffers_a_stream_or_ends_a_long_answer() -> None:
    nginx = (DEPLOY / "fronts/nginx.conf").read_text()
    caddy = (DEPLOY / "fronts/Caddyfile").read_text()
    envoy = yaml.safe_load((DEPLOY / "fronts/envoy.yaml").read_text())
    manager = envoy["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    route = manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]

    for line in ("proxy_buffering off;", "proxy_request_buffering off;", "proxy_read_timeout 3600s;", "client_max_body_size 0;"):
        assert line in nginx
    assert "flush_interval -1" in caddy
    assert "read_timeout 1h" in caddy
    assert (route["timeout"], manager["stream_idle_timeout"]) == ("0s", "3600s")


# --- all of it ------------------------------------------------------------------------------------------------------


def test_the_readme_names_every_folder_and_every_alert() -> None:
    readme = (DEPLOY / "README.md").read_text()
    alerts = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]

    for folder in (path.name for path in DEPLOY.iterdir() if path.is_dir() and path.name != "__pycache__"):
        assert f"`{folder}/`" in readme
    assert all(f"`{rule['alert']}`" in readme for rule in alerts)


def test_no_file_holds_a_secret_or_an_image_that_floats() -> None:
    for path in (path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix in {".yaml", ".yml", ".conf", ".service"}):
        text = path.read_text()
        assert not re.search(r"(?i)(sk-[a-z0-9]|password|bearer )", text), path
        for image in re.findall(r"image: (\S+)", text):
            assert image == "compaction-proxy" or re.search(r":[\d.v]+", image), path


def test_the_helpers_are_python_of_the_oldest_version_that_we_support() -> None:
    ast.parse((DEPLOY / "healthcheck.py").read_text(), feature_version=(3, 11))
