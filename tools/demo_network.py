"""The demo model's configuration, and a fast training forward pass over its transformers weights."""

from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from transformers import GptOssConfig, GptOssForCausalLM

from frontend.text.tokenizer import SpecialToken
from tools.demo_tokenizer import token_id

SLIDING_WINDOW = 128
MAX_POSITIONS = 4096
STOP_TOKENS = (SpecialToken.RETURN, SpecialToken.CALL, SpecialToken.ENDOFTEXT)


class Masks(NamedTuple):
    """Attention masks by kind of layer: block masks on a GPU, else booleans [B, 1, T, T]."""

    sliding: BlockMask | torch.Tensor
    full: BlockMask | torch.Tensor


def demo_config(tokenizer: Tokenizer) -> GptOssConfig:
    """A small gpt-oss: sinks, alternating windows, YaRN, 4 experts of which 2 are active; 9 million
    weights."""
    return GptOssConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=192,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=SLIDING_WINDOW,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": MAX_POSITIONS // 8,
        },
        tie_word_embeddings=False,
        eos_token_id=[token_id(tokenizer, token) for token in STOP_TOKENS],
        pad_token_id=token_id(tokenizer, SpecialToken.ENDOFTEXT),
        dtype="float32",
    )


def document_masks(documents: torch.Tensor) -> Masks:
    """Causal masks for rows [B, T] of several packed documents, which do not see each other."""
    batch, length = documents.shape

    def full(b: Any, _h: Any, q: Any, k: Any) -> Any:
        return (documents[b, q] == documents[b, k]) & (q >= k)

    def sliding(b: Any, h: Any, q: Any, k: Any) -> Any:
        return full(b, h, q, k) & (q - k < SLIDING_WINDOW)

    if documents.is_cuda:
        blocks = [
            create_block_mask(mod, batch, None, length, length, documents.device) for mod in (sliding, full)
        ]
        return Masks(*blocks)
    b, h, q, k = torch.meshgrid(*(torch.arange(n) for n in (batch, 1, length, length)), indexing="ij")
    return Masks(sliding(b, h, q, k), full(b, h, q, k))


def hidden_states(
    model: GptOssForCausalLM, ids: torch.Tensor, positions: torch.Tensor, masks: Masks
) -> tuple[torch.Tensor, torch.Tensor]:
    """The last hidden states [B, T, H], equal to transformers', and the router's balance loss."""
    states = model.model.embed_tokens(ids)
    angles = positions[..., None].float() * model.model.rotary_emb.inv_freq
    scaling = model.model.rotary_emb.attention_scaling
    rotation = ((angles.cos() * scaling)[:, None], (angles.sin() * scaling)[:, None])
    balance = states.new_zeros((), dtype=torch.float32)
    for layer in model.model.layers:
        mask = masks.full if layer.self_attn.sliding_window is None else masks.sliding
        states = states + _attention(layer.self_attn, layer.input_layernorm(states), rotation, mask)
        mixed, penalty = _experts(layer.mlp, layer.post_attention_layernorm(states))
        states, balance = states + mixed, balance + penalty
    return model.model.norm(states), balance


def _attention(
    attention: Any,
    states: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    mask: BlockMask | torch.Tensor,
) -> torch.Tensor:
    batch, length, _ = states.shape
    query, key, value = (
        project(states).view(batch, length, -1, attention.head_dim).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    query, key = (_rotated(part, *rotation).to(value.dtype) for part in (query, key))
    sinks = attention.sinks[None, :, None]
    if isinstance(mask, BlockMask):
        out, aux = flex_attention(
            query, key, value, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        # A sink is an extra softmax entry without a value: it reduces the weight of the others.
        out = out * torch.sigmoid(aux.lse - sinks)[..., None].to(out.dtype)
    else:
        groups = attention.num_key_value_groups
        scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * attention.scaling
        scores = torch.cat(
            [scores.masked_fill(~mask, -torch.inf), sinks[..., None].expand(batch, -1, length, 1)], dim=-1
        )
        out = scores.softmax(-1)[..., :-1] @ value.repeat_interleave(groups, 1)
    projected: torch.Tensor = attention.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
    return projected


def _rotated(part: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = part.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _experts(mlp: Any, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All experts on all tokens: twice the work, but two large matrix products instead of a loop."""
    flat = states.reshape(-1, states.shape[-1])
    experts, router = mlp.experts, mlp.router
    logits = functional.linear(flat, router.weight, router.bias).float()
    top, chosen = logits.topk(router.top_k, dim=-1)
    weights = torch.zeros_like(logits).scatter(1, chosen, top.softmax(-1))
    share = (weights > 0).float().mean(0)
    balance = (share * logits.softmax(-1).mean(0)).sum() * router.num_experts
    gate_up = torch.matmul(flat[None], experts.gate_up_proj) + experts.gate_up_proj_bias[:, None]
    gate, up = (
        gate_up[..., ::2].clamp(max=experts.limit),
        gate_up[..., 1::2].clamp(-experts.limit, experts.limit),
    )
    out = torch.matmul((up + 1) * gate * torch.sigmoid(gate * experts.alpha), experts.down_proj)
    out = (out + experts.down_proj_bias[:, None]) * weights.T[..., None].to(out.dtype)
    return out.sum(0).view_as(states).to(states.dtype), balance
