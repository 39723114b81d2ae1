"""Tiny random drafters written as each tool writes them, all for one target of eight layers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvbraid.model.config import ModelConfig, RopeConfig
from kvbraid.speculative.drafter_source import OpenedDrafter, open_drafter

ASSETS = Path(__file__).parents[3] / "assets"
WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN = 16, 4, 2, 4, 24
VOCAB, DRAFT_VOCAB, RANK = 64, 24, 3
TAPS = (1, 3, 4)  # the default of eight layers
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 6, 5, 4, 2, 3

TARGET = ModelConfig(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=32,
    num_layers=8,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    rope=RopeConfig(),
)

LAYER_CONFIG: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "rope_scaling": None,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "vocab_size": VOCAB,
}
MLA_CONFIG: dict[str, Any] = LAYER_CONFIG | {
    "num_key_value_heads": HEADS,
    "head_dim": ROPE,
    "q_lora_rank": Q_RANK,
    "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
}


@dataclass
class Files:
    """What goes into a drafter's folder; tests change it before they open it."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def write(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.json").write_text(json.dumps(self.config))
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, self.folder / "model.safetensors")
        return self.folder

    def open(self, target: ModelConfig = TARGET) -> OpenedDrafter:
        return open_drafter(self.write(), target)


def read_all(opened: OpenedDrafter) -> dict[str, Tensor]:
    """Every tensor of the source, whole."""
    source = opened.source
    return {
        name: source.read(name, tuple(range(size) for size in stored.shape))
        for name, stored in source.tensors.items()
    }


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
        for name, shape in shapes.items()
    }


def norms(prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.input_layernorm.weight": (WIDTH,),
        f"{prefix}.post_attention_layernorm.weight": (WIDTH,),
    }


def mlp(prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.mlp.gate_proj.weight": (FFN, WIDTH),
        f"{prefix}.mlp.up_proj.weight": (FFN, WIDTH),
        f"{prefix}.mlp.down_proj.weight": (WIDTH, FFN),
    }


def gqa(prefix: str, input_width: int, *, qk_norm: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, input_width),
        f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, input_width),
        f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, input_width),
        f"{prefix}.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
    }
    if qk_norm:
        shapes[f"{prefix}.self_attn.q_norm.weight"] = (HEAD_DIM,)
        shapes[f"{prefix}.self_attn.k_norm.weight"] = (HEAD_DIM,)
    return shapes


def mla(prefix: str, input_width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_a_proj.weight": (Q_RANK, input_width),
        f"{prefix}.self_attn.q_a_layernorm.weight": (Q_RANK,),
        f"{prefix}.self_attn.q_b_proj.weight": (HEADS * (NOPE + ROPE), Q_RANK),
        f"{prefix}.self_attn.kv_a_proj_with_mqa.weight": (KV_RANK + ROPE, input_width),
        f"{prefix}.self_attn.kv_a_layernorm.weight": (KV_RANK,),
        f"{prefix}.self_attn.kv_b_proj.weight": (HEADS * (NOPE + VALUE), KV_RANK),
        f"{prefix}.self_attn.o_proj.weight": (WIDTH, HEADS * VALUE),
    }


def vocabulary_maps(seed: int = 1) -> dict[str, Tensor]:
    """d2t as offsets and t2d, of DRAFT_VOCAB ids in rising order."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    membership = torch.zeros(VOCAB, dtype=torch.bool)
    membership[ids] = True
    return {"d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": membership}


def eagle3_tensors(
    layer: str, *, num_taps: int = 3, head_rows: int = DRAFT_VOCAB, qk_norm: bool = False
) -> dict[str, Tensor]:
    """An EAGLE3 of one GQA layer named `layer`; equal numbers whatever the name."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (WIDTH, num_taps * WIDTH),
        "norm.weight": (WIDTH,),
        "lm_head.weight": (head_rows, WIDTH),
        f"{layer}.hidden_norm.weight": (WIDTH,),
    }
    shapes |= norms(layer) | mlp(layer) | gqa(layer, 2 * WIDTH, qk_norm=qk_norm)
    maps = vocabulary_maps() if head_rows < VOCAB else {}
    return random_tensors(shapes) | maps


def dspark_tensors(*, attention: str = "gqa") -> dict[str, Tensor]:
    """A DSpark of two layers, canonical names, without embedding and head."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (WIDTH, 3 * WIDTH),
        "hidden_norm.weight": (WIDTH,),
        "norm.weight": (WIDTH,),
        "markov_head.markov_w1.weight": (VOCAB, RANK),
        "markov_head.markov_w2.weight": (VOCAB, RANK),
        "confidence_head.proj.weight": (1, WIDTH + RANK),
        "confidence_head.proj.bias": (1,),
    }
    for i in range(2):
        layer = f"layers.{i}"
        shapes |= norms(layer) | mlp(layer)
        shapes |= mla(layer, WIDTH) if attention == "mla" else gqa(layer, WIDTH, qk_norm=True)
    return random_tensors(shapes)


class DrafterFiles:
    """One method a dialect; all describe the same drafter where they can."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _files(
        self, name: str, config: dict[str, Any], tensors: dict[str, Tensor], changes: dict[str, Any]
    ) -> Files:
        return Files(self._folder / name, config | changes, tensors)

    def safeailab(self, **changes: Any) -> Files:
        config = LAYER_CONFIG | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": DRAFT_VOCAB,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "torch_dtype": "float16",
        }
        return self._files("safeailab", config, eagle3_tensors("midlayer"), changes)

    def specforge(self, **changes: Any) -> Files:
        config = LAYER_CONFIG | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "kimi_k2",
            "num_hidden_layers": 1,
            "draft_vocab_size": DRAFT_VOCAB,
            "tie_word_embeddings": False,
            "max_window_layers": 48,
            "sliding_window": None,
            "use_sliding_window": False,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(TAPS),
                "use_aux_hidden_state": True,
            },
        }
        return self._files("specforge", config, eagle3_tensors("midlayer"), changes)

    def speculators_eagle3(self, **changes: Any) -> Files:
        layer = LAYER_CONFIG | {"model_type": "llama", "num_hidden_layers": 1}
        config = {
            "architectures": ["Eagle3Speculator"],
            "auto_map": {"": "config.Eagle3SpeculatorConfig"},
            "speculators_model_type": "eagle3",
            "speculators_version": "0.4.0.1",
            "has_no_defaults_at_init": False,
            "transformer_layer_config": layer | {"tie_word_embeddings": True},
            "draft_vocab_size": DRAFT_VOCAB,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": [i + 1 for i in TAPS],
            "embed_requires_grad": False,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
                "verifier": {"name_or_path": "some/verifier", "architectures": []},
            },
        }
        return self._files("speculators", config, eagle3_tensors("layers.0"), changes)

    def deepspec_eagle3(self, **changes: Any) -> Files:
        config = LAYER_CONFIG | {
            "architectures": ["Qwen3Eagle3Model"],
            "model_type": "qwen3",
            "num_target_layers": 8,
            "num_hidden_layers": 1,
            "draft_num_hidden_layers": 1,
            "target_layer_ids": [0, 1, 3, 4, 6],
            "ttt_length": 7,
            "step_loss_decay": 0.8,
            "target_model_name_or_path": "some/target",
            "tie_word_embeddings": False,
            "layer_types": ["full_attention"],
        }
        tensors = eagle3_tensors("layers.0", num_taps=5, head_rows=VOCAB, qk_norm=True)
        tensors["embed_tokens.weight"] = random_tensors({"e": (VOCAB, WIDTH)}, 3)["e"]
        return self._files("deepspec", config, tensors, changes)

    def mla_eagle3(self, **changes: Any) -> Files:
        config = MLA_CONFIG | {
            "architectures": ["Eagle3DeepseekV2ForCausalLM"],
            "model_type": "kimi_k2",
            "num_hidden_layers": 1,
            "fc_norm": True,
            "norm_output": True,
            "tie_word_embeddings": False,
            "n_routed_experts": 8,
            "first_k_dense_replace": 1,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i + 1 for i in TAPS]},
        }
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (WIDTH, 3 * WIDTH),
            "norm.weight": (WIDTH,),
            "lm_head.weight": (VOCAB, WIDTH),
            "embed_tokens.weight": (VOCAB, WIDTH),
            "midlayer.hidden_norm.weight": (WIDTH,),
        }
        shapes |= {f"fc_norm.{i}.weight": (WIDTH,) for i in range(3)}
        shapes |= norms("midlayer") | mlp("midlayer") | mla("midlayer", 2 * WIDTH)
        return self._files("mla_eagle3", config, random_tensors(shapes), changes)

    def deepspec_dspark(self, **changes: Any) -> Files:
        config = LAYER_CONFIG | {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "full_attention"],
            "num_target_layers": 8,
            "num_anchors": 512,
            "tie_word_embeddings": False,
            "block_size": 7,
            "target_layer_ids": list(TAPS),
            "mask_token_id": 63,
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        return self._files("dspark", config, dspark_tensors(), changes)

    def specforge_dspark(self, **changes: Any) -> Files:
        config = LAYER_CONFIG | {
            "architectures": ["DSparkDraftModel"],
            "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "full_attention"],
            "num_target_layers": 8,
            "block_size": 7,
            "dflash_config": {
                "projector_type": "dspark",
                "attention_mode": "gqa",
                "target_layer_ids": list(TAPS),
                "mask_token_id": 63,
                "markov_rank": RANK,
                "markov_head_type": "vanilla",
                "confidence_head_alpha": 1.0,
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
            },
        }
        return self._files("specforge_dspark", config, dspark_tensors(), changes)

    def speculators_dspark(self, **changes: Any) -> Files:
        layer = LAYER_CONFIG | {"model_type": "qwen3", "num_hidden_layers": 2}
        config = {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": "dspark",
            "transformer_layer_config": layer,
            "draft_vocab_size": VOCAB,
            "target_hidden_size": WIDTH,
            "aux_hidden_state_layer_ids": [i + 1 for i in TAPS],
            "block_size": 7,
            "max_anchors": 1024,
            "mask_token_id": 63,
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "sample_from_anchor": True,
            "sliding_window_non_causal": False,
            "speculators_config": {
                "algorithm": "dspark",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
            },
        }
        return self._files("speculators_dspark", config, dspark_tensors(), changes)

    def k3_dspark(self, **changes: Any) -> Files:
        config = MLA_CONFIG | {
            "architectures": ["K3DSparkModel"],
            "model_type": "k3_dspark",
            "num_hidden_layers": 2,
            "mla_use_nope": False,
            "mla_use_output_gate": False,
            "num_target_layers": 3,
            "target_hidden_size": WIDTH,
            "target_num_hidden_layers": 8,
            "target_layer_ids": list(TAPS),
            "mask_token_id": 63,
            "markov_rank": RANK,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            "tie_word_embeddings": False,
            "draft_vocab_size": VOCAB,
            "_torchspec_version": "0.1.0",
        }
        names = {"fc": "context_proj", "hidden_norm": "context_norm", "norm": "final_norm"}
        tensors = {}
        for name, tensor in dspark_tensors(attention="mla").items():
            stem = name.removesuffix(".weight")
            tensors[f"{names[stem]}.weight" if stem in names else name] = tensor
        return self._files("k3", config, tensors, changes)


@pytest.fixture
def drafters(tmp_path: Path) -> DrafterFiles:
    return DrafterFiles(tmp_path)


@pytest.fixture
def lab() -> SimpleNamespace:
    """The names above, for test modules (which cannot import a conftest)."""
    return SimpleNamespace(
        ASSETS=ASSETS,
        TARGET=TARGET,
        TAPS=TAPS,
        WIDTH=WIDTH,
        VOCAB=VOCAB,
        DRAFT_VOCAB=DRAFT_VOCAB,
        RANK=RANK,
        random_tensors=random_tensors,
        read_all=read_all,
    )
