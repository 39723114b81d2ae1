"""A Prometheus that scrapes a running cluster, with our rules."""

from __future__ import annotations

import json
import re
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
from tools.fetch_prometheus import installed

_START_S = 30.0


class Prometheus:
    """A context manager; targets: host:port by instance name.

    scrape_s: how often targets are scraped and rules evaluated. hold_s: how long conditions of
    alerts must last instead of what the rules say in minutes; None: what they say. Raises
    FileNotFoundError where the binary is not installed.
    """

    def __init__(
        self, folder: Path, targets: Mapping[str, str], *, scrape_s: int, hold_s: int | None = None
    ) -> None:
        binary = installed("prometheus")
        if binary is None:
            raise FileNotFoundError("prometheus: get it with python -m tools.fetch_prometheus")
        self._binary = binary
        self._folder = folder
        self._targets = targets
        self._scrape_s = scrape_s
        self._hold_s = hold_s
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"

    def __enter__(self) -> Self:
        config = self._folder / "prometheus.yml"
        config.write_text(json.dumps(self._config()))
        self._log = (self._folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [
                self._binary, f"--config.file={config}", f"--web.listen-address={self._address}",
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

    def firing(self, window: str = "") -> set[str]:
        """Names of the alerts that fire now; with a window as in 20m: that did at any time in
        it."""
        selector = 'ALERTS{alertstate="firing"}'
        samples = self.query(f"max_over_time({selector}[{window}])" if window else selector)
        return {labels["alertname"] for labels, _ in samples}

    def _config(self) -> dict[str, Any]:
        files = []
        for name, group in (("recording", RECORDING), ("alerts", ALERTS)):
            path = self._folder / f"{name}.yaml"
            text = with_defaults(group.to_yaml())
            text = text.replace("interval: 15s", f"interval: {self._scrape_s}s")
            if self._hold_s is not None:
                text = re.sub(r"for: \d+m", f"for: {self._hold_s}s", text)
            path.write_text(text)
            files.append(str(path))
        targets = [
            {"targets": [address], "labels": {"instance": name}}
            for name, address in self._targets.items()
        ]
        every = f"{self._scrape_s}s"
        return {
            "global": {"scrape_interval": every, "evaluation_interval": every},
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
