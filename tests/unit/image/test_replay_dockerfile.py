"""The Dockerfile reader and its replay, on small files of every construct."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.dockerfile import DockerfileError, expand, read_dockerfile
from tools.replay_dockerfile import Image, Replay

PYTHON = f"python:{sys.version_info.major}.{sys.version_info.minor}.9-slim"
TEXT = f"""
ARG BASE={PYTHON}
FROM ${{BASE}} AS base
ENV GREETING="good day"

# a comment
FROM base AS build
ARG WHO=nobody
WORKDIR /build
COPY words.txt folder ./
RUN apt-get install gcc
RUN mkdir -p /opt/thing \\
    # between two lines
    && python -c 'import sys; print(sys.version_info[:2])' > /opt/thing/version \\
    && echo "$GREETING $WHO" > /opt/thing/greeting

FROM base AS final
COPY --from=build /opt/thing /opt/thing
COPY words.txt /opt/renamed.txt
ENV THING=/opt/thing PATH=/opt/thing/bin:$PATH
LABEL a.b="${{GREETING}}"
USER 7:8
STOPSIGNAL SIGINT
HEALTHCHECK --interval=5s CMD ["probe", "/opt/thing"]
ENTRYPOINT ["thing"]
CMD ["--help"]
"""


@pytest.fixture
def context(tmp_path: Path) -> Path:
    context = tmp_path / "context"
    (context / "folder").mkdir(parents=True)
    (context / "Dockerfile").write_text(TEXT)
    (context / "words.txt").write_text("words")
    (context / "folder" / "inner.txt").write_text("inner")
    return context


def replay(context: Path, **arguments: str) -> tuple[Replay, Image]:
    dockerfile = read_dockerfile(context / "Dockerfile")
    run = Replay(dockerfile, context.parent / "work", context=context, arguments=arguments)
    return run, run.build("final")


def test_the_final_stage_has_its_files_and_only_those(context: Path) -> None:
    _, image = replay(context)
    files = sorted(p.relative_to(image.root).as_posix() for p in image.root.rglob("*.*"))
    assert files == ["opt/renamed.txt"]
    assert (image.root / "opt/thing/greeting").read_text() == "good day nobody\n"
    version = (image.root / "opt/thing/version").read_text().strip()
    assert version == str(tuple(sys.version_info[:2]))


def test_build_arguments_are_taken_and_do_not_stay(context: Path) -> None:
    _, image = replay(context, WHO="you")
    assert (image.root / "opt/thing/greeting").read_text() == "good day you\n"
    assert "WHO" not in image.environment


def test_the_image_says_how_it_is_run(context: Path) -> None:
    _, image = replay(context)
    thing = f"{image.root}/opt/thing"
    assert image.environment["THING"] == thing
    assert image.environment["PATH"].startswith(f"{thing}/bin:")
    assert image.labels == {"a.b": "good day"}
    assert (image.user, image.stop_signal) == ("7:8", "SIGINT")
    assert image.healthcheck == ["probe", thing]
    assert [*image.entrypoint, *image.command] == ["thing", "--help"]


def test_steps_of_the_system_are_skipped_and_told(context: Path) -> None:
    run, _ = replay(context)
    assert run.skipped == ["apt-get install gcc"]


def test_a_failing_step_fails(context: Path) -> None:
    path = context / "Dockerfile"
    path.write_text(TEXT.replace("RUN mkdir", "RUN false && mkdir"))
    with pytest.raises(subprocess.CalledProcessError):
        replay(context)


def test_an_image_of_another_python_is_refused(context: Path) -> None:
    path = context / "Dockerfile"
    path.write_text(TEXT.replace(PYTHON, "python:2.7.18-slim"))
    with pytest.raises(ValueError, match=r"python:2\.7\.18-slim"):
        replay(context)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RUN true", "RUN before FROM"),
        ("FROM image", "FROM must be"),
        ("FROM a AS b\nrun true", "'run' must be"),
        ("FROM a AS b\nRUN <<EOF", "heredocs"),
        ("FROM a AS b\nRUN true \\", "ends inside"),
    ],
)
def test_what_is_not_read_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(text)
    with pytest.raises(DockerfileError, match=message):
        read_dockerfile(path)


def test_variables_are_replaced_as_docker_does() -> None:
    assert expand("$A ${A} ${B:-b} [$C]", {"A": "a"}) == "a a b []"
