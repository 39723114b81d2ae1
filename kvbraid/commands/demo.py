"""`kvbraid demo`: the whole project in half a minute, with a real model and nothing pretended."""

from __future__ import annotations

import argparse
import asyncio

from kvbraid.cluster import ClusterSpec, LocalCluster, WorkerSpec
from kvbraid.commands.generate import write_text
from kvbraid.commands.generation import Generation, generate
from kvbraid.commands.model import pull_model
from kvbraid.commands.model_path import resolve_model
from kvbraid.errors import NotFoundError
from kvbraid.rpc.channels import ChannelPool
from kvbraid.rpc.client_errors import translated_rpc_errors
from kvbraid.settings import ServerSettings, tls_from_environment
from kvbraid.v1 import coordinator_pb2, generation_pb2, info_pb2, info_pb2_grpc

_MODEL = "smollm2-135m-instruct"
_QUESTION = "Why is the sky blue? Answer in two sentences."
# Small, so that counting the rows in it is quick; the decode pool starts as NaN, to count by.
_POOL = "kv_cache_tokens=2048"
_ANSWER_TIMEOUT_S = 300.0
_INFO_TIMEOUT_S = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--model", default=_MODEL, help="model; fetched if it is not there")
    parser.add_argument("--question", default=_QUESTION, help="what to ask")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer, in tokens")


def run(arguments: argparse.Namespace) -> int:
    """Start, ask, report, stop. Exit code 0 only if the answer has text and a proper end."""
    spec = ClusterSpec(
        model=_ensure_model(arguments.model),
        prefill=(WorkerSpec.parse("prefill", f"tp=1,dcp=1,{_POOL}"),),
        decode=(WorkerSpec.parse("decode", f"tp=2,dcp=2,poison_kv=true,{_POOL}"),),
    )
    print("starting: prefill worker (tp 1, dcp 1), decode worker (tp 2, dcp 2), coordinator")
    with LocalCluster(spec) as cluster:
        cluster.start(timeout_s=600, progress=lambda line: print(f"  {line}", flush=True))
        print(f"\n> {arguments.question}\n", flush=True)
        answer, info = asyncio.run(_ask(cluster, arguments.question, arguments.max_tokens))
        _report(cluster, answer, info)
    print("stopped")
    return 0 if answer.text and answer.finish_reason in ("stop", "length") else 1


def _ensure_model(name: str) -> str:
    try:
        return str(resolve_model(name))
    except NotFoundError:
        pull_model(name)
        return str(resolve_model(name))


async def _ask(
    cluster: LocalCluster, question: str, max_tokens: int
) -> tuple[Generation, info_pb2.InfoResponse]:
    """The streamed answer, then what the decode worker says of itself."""
    request = coordinator_pb2.GenerateRequest(
        sampling=generation_pb2.SamplingParams(temperature=0.0, max_tokens=max_tokens)
    )
    request.chat.messages.add(role="user", content=question)
    target = cluster.coordinator.grpc
    tls = tls_from_environment()  # of the services too
    answer = await generate(
        target, request, timeout_s=_ANSWER_TIMEOUT_S, on_text=write_text, tls=tls
    )
    decode = cluster.workers["decode-0"].grpc
    async with ChannelPool(ServerSettings(tls=tls)) as pool:
        stub = info_pb2_grpc.InfoServiceStub(pool.channel(decode))
        with translated_rpc_errors(decode):
            info = await stub.Info(info_pb2.InfoRequest(with_rows=True), timeout=_INFO_TIMEOUT_S)
    return answer, info


def _report(cluster: LocalCluster, answer: Generation, info: info_pb2.InfoResponse) -> None:
    counts = f"{answer.num_prompt_tokens} prompt and {answer.num_completion_tokens} answer tokens"
    print(f"\n\n{counts}, ended by {answer.finish_reason or 'nothing'}")
    print("KV rows (layer x token x head) that each rank of the decode worker holds:")
    sizes = zip(info.rows_per_rank, info.pool_bytes_per_rank, strict=True)
    for rank, (num_rows, num_bytes) in enumerate(sizes):
        print(f"  rank {rank}: {num_rows} rows in a pool of {num_bytes / 1e6:.1f} MB")
    print("metrics:")
    for name, report in {"coordinator": cluster.coordinator, **cluster.workers}.items():
        print(f"  {name}: http://{report.metrics}/metrics")
