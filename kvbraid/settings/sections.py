"""The sections that several services share. Each service's config.py composes what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbraid.address import split_address
from kvbraid.errors import ConfigError
from kvbraid.settings.fields import ByteSize, setting
from kvbraid.settings.server import ServerSettings


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Which checkpoint is served and how much context it gets."""

    model: str = setting("", "Hugging Face folder or GGUF file or folder.")
    served_model_name: str = setting("", "Name that clients ask for; empty: the folder's name.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "Compute type; auto is float32 on CPU and bfloat16 on a GPU."
    )
    device: str = setting("auto", "Torch device; auto takes a GPU when there is one.")
    max_model_len: int = setting(
        0, "Longest prompt plus output; 0 takes the model's own limit.", unit="tokens", minimum=0
    )


@dataclass(frozen=True, slots=True)
class ParallelSettings:
    """How a worker spreads over ranks."""

    tp_size: int = setting(1, "Tensor-parallel ranks of the worker.", unit="ranks", minimum=1)
    dcp_size: int = setting(
        1, "Ranks that stripe one sequence's KV cache; divides tp_size.", unit="ranks", minimum=1
    )
    q_mode: Literal["gather", "replicate"] = setting(
        "gather", "Gather the queries of a stripe's heads, or compute them from replicated weights."
    )
    exchange: Literal["ag_rs", "a2a", "fused"] = setting(
        "ag_rs", "How partial attention results are merged over a stripe."
    )
    communicator: Literal["auto", "shared_memory", "gloo", "nccl"] = setting(
        "auto", "Collectives of the ranks; auto: shared_memory on one host's CPUs, nccl on GPUs."
    )
    attention_backend: str = setting("auto", "Attention backend; auto takes the best that fits.")
    cuda_graphs: Literal["auto", "always", "never"] = setting(
        "auto",
        "Replay decode steps, and those of a drafter here, as CUDA graphs; auto: on GPUs where "
        "nothing stands against it; always: the worker refuses to start otherwise.",
    )
    heartbeat_seconds: float = setting(
        2.0,
        "Silence after which a rank counts as dead and the worker stops.",
        unit="seconds",
        minimum=0.2,
    )
    engine_step_timeout_seconds: float = setting(
        120.0,
        "Longest engine step; a worker that is in one for longer is stuck: it gets no requests, "
        "fails those it has, and is not live until the step ends.",
        unit="seconds",
        minimum=0.1,
    )
    threads_per_rank: int = setting(
        0,
        "CPU threads of a rank; 0 shares the cores among the ranks, and is 1 for those on GPUs.",
        unit="threads",
        minimum=0,
    )
    debug_guard: bool = setting(
        False,
        "Compare step plans, token windows, page tables and sampled ids of all ranks in each step; "
        "the worker stops where they differ.",
    )

    def __post_init__(self) -> None:
        if self.tp_size % self.dcp_size:
            raise ConfigError(
                f"dcp_size is {self.dcp_size}, accepted: divisors of tp_size {self.tp_size}"
            )


@dataclass(frozen=True, slots=True)
class KvSettings:
    """The KV cache of a worker."""

    page_size: int = setting(
        16,
        "Tokens of a physical page; a logical page has dcp_size times as many.",
        unit="tokens",
        minimum=1,
    )
    interleave: int = setting(
        1, "Consecutive tokens of one owner; divides page_size.", unit="tokens", minimum=1
    )
    kv_cache_tokens: int = setting(
        0,
        "Tokens that the pool holds over a stripe; 0: sized by kv_memory_fraction.",
        unit="tokens",
        minimum=0,
    )
    kv_memory_fraction: float = setting(
        0.3, "Part of the free memory that the pools may take.", minimum=0.01, maximum=0.98
    )
    prefix_cache: bool = setting(True, "Keep the KV of finished prompts for later requests.")
    poison_kv: bool = setting(
        False, "Fill the pools with NaN at start: shows which rows are written, and misreads."
    )

    def __post_init__(self) -> None:
        if self.page_size % self.interleave:
            raise ConfigError(
                f"interleave is {self.interleave}, accepted: divisors of page_size {self.page_size}"
            )


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How much one engine step may hold."""

    max_num_seqs: int = setting(16, "Most sequences that run at once.", unit="sequences", minimum=1)
    max_num_waiting: int = setting(
        256,
        "Most sequences that wait; more are refused.",
        unit="sequences",
        minimum=0,
    )
    max_num_batched_tokens: int = setting(
        2048, "Most tokens of one step.", unit="tokens", minimum=1
    )
    prefill_chunk_tokens: int = setting(
        512, "Most prompt tokens of one sequence in one step.", unit="tokens", minimum=1
    )


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """How KV rows travel between workers."""

    kv_mover: Literal["auto", "shared_memory", "grpc_push"] = setting(
        "auto", "How rows are pushed; auto: shared memory on one host, gRPC otherwise."
    )
    staging_slots: int = setting(
        16, "Slots of a rank's staging ring for arriving rows.", unit="slots", minimum=2
    )
    staging_slot_bytes: ByteSize = setting(
        ByteSize(1 << 20), "Size of a staging slot, the largest frame.", unit="bytes", minimum=65536
    )
    lease_seconds: float = setting(
        20.0, "A handoff in which nothing arrives for this long is given up.", unit="seconds",
        minimum=0.1,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SpeculativeSettings:
    """Whether tokens are drafted, by what and how long a step waits for drafts."""

    drafter: str = setting("", "Drafter checkpoint that this worker runs itself; empty: none.")
    draft_worker: str = setting(
        "", "host:port of a draft service that drafts instead; empty: none."
    )
    draft_wire: Literal["auto", "local_socket", "tcp", "grpc"] = setting(
        "auto",
        "How steps reach draft_worker; auto: a Unix socket and shared memory on one host, else a "
        "TCP socket where the service offers one, else gRPC.",
    )
    tap_fusion: str = setting(
        "", "With draft_worker: the service's drafter checkpoint; this worker applies its fc."
    )
    max_draft_tokens: int = setting(
        0, "Most drafts of a step; 0: as many as the drafter was trained for.", unit="tokens",
        minimum=0, maximum=64,
    )  # fmt: skip
    draft_kv_tokens: int = setting(
        0, "Tokens that the drafter's own KV pool holds; 0: enough for max_num_seqs full contexts, "
        "within kv_memory_fraction.", unit="tokens", minimum=0,
    )  # fmt: skip
    draft_policy: Literal["adaptive", "fixed"] = setting(
        "adaptive",
        "adaptive: as many drafts as pay, none below break-even; fixed: always max_draft_tokens.",
    )
    draft_verification: Literal["exact_match", "ratio_test"] = setting(
        "exact_match",
        "exact_match: tokens are those of plain decoding; ratio_test: their law is, and sampled "
        "drafts are accepted a little more often (embedded drafter only).",
    )
    draft_profile_seconds: float = setting(
        1.5, "On CPUs, longest that steps are timed with drafts before a decode worker serves; 0: "
        "costs are learnt in use only.", unit="seconds", minimum=0, maximum=600,
    )  # fmt: skip
    draft_timeout_ms: float = setting(
        50.0, "Longest that a step waits for draft_worker or, with draft_policy=fixed, for a "
        "prompt's rows; it decodes plainly then.",
        unit="milliseconds", minimum=0.1, maximum=60000,
    )  # fmt: skip
    draft_timeout_fraction: float = setting(
        1.0, "Longest that a step waits for draft_worker, as a part of a measured step.",
        minimum=0.01, maximum=100,
    )  # fmt: skip
    draft_max_failures: int = setting(
        5, "Failed steps in a row after which draft_worker is left alone.", unit="steps", minimum=1
    )
    draft_probe_seconds: float = setting(
        1.0, "How often a draft_worker that is left alone is probed, at first.", unit="seconds",
        minimum=0.05, maximum=3600,
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.drafter and self.draft_worker:
            raise ConfigError(
                f"drafter is {self.drafter} and draft_worker is {self.draft_worker}: accepted is "
                f"one of them; with draft_worker the checkpoint is given as tap_fusion"
            )
        if bool(self.draft_worker) != bool(self.tap_fusion):
            raise ConfigError(
                f"draft_worker is {self.draft_worker!r} and tap_fusion is {self.tap_fusion!r}: "
                f"accepted are both or none"
            )
        if self.draft_worker and self.draft_verification == "ratio_test":
            raise ConfigError(
                f"draft_verification is ratio_test and draft_worker is {self.draft_worker}: the "
                f"law of its drafts is not known here; accepted is exact_match, or an "
                f"embedded drafter"
            )
        if self.draft_worker:
            split_address(self.draft_worker, "draft_worker")

    @property
    def checkpoint(self) -> str:
        """The drafter whose fc this worker applies; empty when nothing is drafted."""
        return self.drafter or self.tap_fusion

    def num_drafts(self, trained: int) -> int:
        """Most drafts of a step with a drafter that was trained for `trained`."""
        return min(trained, self.max_draft_tokens or trained)


SHARED_SECTIONS = (
    ServerSettings,
    ModelSettings,
    ParallelSettings,
    KvSettings,
    SchedulerSettings,
    TransferSettings,
    SpeculativeSettings,
)
