"""A Prometheus that scrapes a running cluster every second, with our rules."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from deploy.observability.rules.alerts import ALERTS
from deploy.observability.rules.recording import RECORDING
from deploy.observability.rules.slo import with_defaults

BINARY = shutil.which("prometheus")
_START_S = 30.0
HOLD_S = 5
"""How long conditions must last here, instead of minutes."""


class Prometheus:
    """A context manager; targets: host:port by instance name."""

    def __init__(self, folder: Path, targets: Mapping[str, str]) -> None:
        self._folder = folder
        self._targets = targets
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"

    def __enter__(self) -> Self:
        assert BINARY is not None
        config = self._folder / "prometheus.yml"
        config.write_text(json.dumps(self._config()))
        self._log = (self._folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [
                BINARY, f"--config.file={config}", f"--web.listen-address={self._address}",
                f"--storage.tsdb.path={self._folder / 'data'}",
            ],
            stdout=self._log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        self._log.close()

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of every sample now. Raises AssertionError for a query that is wrong."""
        url = f"http://{self._address}/api/v1/query"
        data = urllib.parse.urlencode({"query": expression}).encode()
        try:
            with urllib.request.urlopen(url, data, timeout=20) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        return [(s["metric"], float(s["value"][1])) for s in answer["data"]["result"]]

    def _config(self) -> dict[str, Any]:
        files = []
        for name, group in (("recording", RECORDING), ("alerts", ALERTS)):
            path = self._folder / f"{name}.yaml"
            text = with_defaults(group.to_yaml()).replace("interval: 15s", "interval: 1s")
            path.write_text(re.sub(r"for: \d+m", f"for: {HOLD_S}s", text))
            files.append(str(path))
        targets = [
            {"targets": [address], "labels": {"instance": name}}
            for name, address in self._targets.items()
        ]
        return {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": files,
            "scrape_configs": [{"job_name": "kvbraid", "static_configs": targets}],
        }

    def _wait_ready(self) -> None:
        give_up = time.monotonic() + _START_S
        while True:
            try:
                with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=2):
                    return
            except OSError:
                assert self._process.poll() is None, f"ended: see {self._folder}/prometheus.log"
                assert time.monotonic() < give_up, "Prometheus is not ready"
                time.sleep(0.1)
