"""The cpu image without a container engine: its Dockerfile's steps run in a directory, the
services are started from there as a container would start them, and one request goes through.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvbraid.rpc.ready import ReadyReport, read_ready
from tools.lock_image import DIRECTORY, entries
from tools.replay_dockerfile import DOCKERFILE, Image, Replay, read_dockerfile

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ASSETS = Path(__file__).resolve().parents[2] / "assets"
MODEL = ASSETS / "tiny-mla"
READY_S = 120.0
SKIPPED = ("groupadd",)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """Here pip finds a CPU build of torch without the index that the Dockerfile names."""
    directory = tmp_path_factory.mktemp("image")
    index = os.environ.get("KVBRAID_TEST_TORCH_INDEX", "")
    replay = Replay(read_dockerfile(DOCKERFILE), directory, arguments={"CPU_TORCH_INDEX": index})
    image = replay.build("cpu")
    assert [step.split()[0] for step in replay.skipped] == list(SKIPPED)
    yield image
    shutil.rmtree(directory)  # more than a gigabyte


@dataclass
class Container:
    """A process with the image's environment and nothing of this one's."""

    image: Image
    directory: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def environment(self, name: str) -> dict[str, str]:
        own = {"HOME": str(self.directory), "KVBRAID_READY_FILE": str(self.ready_file(name))}
        return {**self.image.environment, **own}

    def ready_file(self, name: str) -> Path:
        return self.directory / f"{name}.ready"

    def start(self, name: str, *flags: str) -> ReadyReport:
        command = [*self.image.entrypoint, name, f"--model={MODEL}", *flags]
        with (self.directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, env=self.environment(name), cwd=self.directory, stdout=log, stderr=log
            )
        self.processes.append(process)
        give_up = time.monotonic() + READY_S
        while (report := read_ready(self.ready_file(name))) is None:
            text = (self.directory / f"{name}.log").read_text()
            assert process.poll() is None, text
            assert time.monotonic() < give_up, text
            time.sleep(0.05)
        return report

    def run(self, *command: str, name: str = "client") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environment(name),
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=120,
        )


@pytest.fixture
def container(image: Image, tmp_path: Path) -> Iterator[Container]:
    container = Container(image, tmp_path)
    yield container
    for process in container.processes:
        process.kill()
        process.wait()


def test_it_holds_what_was_locked_and_no_build_tool(container: Container) -> None:
    listed = container.run("python", "-m", "pip", "list", "--format=json")
    found = {item["name"].lower().replace("_", "-") for item in json.loads(listed.stdout)}
    locked = {name for name, _ in entries((DIRECTORY / "requirements.lock").read_text())}
    assert found == locked | {"torch", "kvbraid"}
    assert not (container.image.root / "build").exists()
    assert {path.name for path in (container.image.root / "opt/kvbraid").iterdir()} == {
        "venv",
        "healthcheck.py",
    }


def test_the_code_comes_from_the_wheel(container: Container) -> None:
    place = container.run("python", "-c", "import kvbraid, coordinator; print(kvbraid.__file__)")
    assert Path(place.stdout.strip()).is_relative_to(container.image.root), place.stderr


def test_without_a_command_it_says_which_there_are(container: Container) -> None:
    image = container.image
    result = container.run(*image.entrypoint, *image.command)
    assert result.returncode == 0
    for role in ("coordinator", "prefill", "decode", "draft"):
        assert f"\n  {role} " in result.stdout


def test_the_roles_serve_answer_and_drain(container: Container) -> None:
    lines = (ASSETS / "reference" / "tiny-mla-greedy.jsonl").read_text().splitlines()
    case = next(c for c in map(json.loads, lines) if c["n_prompt"] > 40)
    prompt = container.directory / "prompt.json"
    prompt.write_text(json.dumps(case["prompt_ids"]))

    pool = "--kv-cache-tokens=4096"
    prefill = container.start("prefill", pool)
    decode = container.start("decode", pool, "--tp-size=2", "--dcp-size=2")
    workers = (f"--prefill-workers={prefill.grpc}", f"--decode-workers={decode.grpc}")
    coordinator = container.start("coordinator", *workers)

    for name in ("prefill", "decode", "coordinator"):
        health = container.run(*container.image.healthcheck, name=name)
        assert health.returncode == 0, health.stderr
    assert container.run(*container.image.healthcheck, name="nobody").returncode == 1

    flags = ["--temperature=0", f"--max-tokens={len(case['output_ids'])}", "--json"]
    answer = container.run(
        *container.image.entrypoint,
        "generate",
        f"--target={coordinator.grpc}",
        f"--prompt-ids={prompt}",
        *flags,
    )
    assert answer.returncode == 0, answer.stderr
    tokens = json.loads(answer.stdout)["token_ids"]
    assert tokens == case["output_ids"][: len(tokens)]
    assert len(tokens) >= 8

    for process in reversed(container.processes):
        process.send_signal(signal.Signals[container.image.stop_signal])
        assert process.wait(60) == 0
