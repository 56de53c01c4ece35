# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The two vision towers, up to the last block (the final norm is never applied).

Parameter names are those of the checkpoints, so a state dict loads as it is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """RMS norm computed in float32, cast back, then scaled."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        return wide.to(x.dtype) * self.weight


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """Full attention; q, k, v and the result are [batch, tokens, width]."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class AIMv2Attention(nn.Module):
    def __init__(self, width: int, heads: int, qkv_bias: bool, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj(attend(q, k, v, self.heads))


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int, bias: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner, bias=bias)
        self.fc3 = nn.Linear(width, inner, bias=bias)
        self.fc2 = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.silu(self.fc1(x)) * self.fc3(x))


class AIMv2Block(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        width, eps = c["hidden_size"], c["rms_norm_eps"]
        self.norm_1 = RMSNorm(width, eps)
        self.attn = AIMv2Attention(
            width, c["num_attention_heads"], c["qkv_bias"], c["use_bias"]
        )
        self.norm_2 = RMSNorm(width, eps)
        self.mlp = SwiGLU(width, c["intermediate_size"], c["use_bias"])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class AIMv2Patchifier(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        width, patch = c["hidden_size"], c["patch_size"]
        self.proj = nn.Conv2d(c["num_channels"], width, patch, stride=patch)
        self.norm = RMSNorm(width, c["rms_norm_eps"])

    def forward(self, pixels: Tensor) -> Tensor:
        return self.norm(self.proj(pixels).flatten(2).transpose(1, 2))


class AIMv2Preprocessor(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        tokens = (c["image_size"] // c["patch_size"]) ** 2
        self.patchifier = AIMv2Patchifier(c)
        self.pos_embed = nn.Parameter(torch.zeros(1, tokens, c["hidden_size"]))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.patchifier(pixels) + self.pos_embed


class AIMv2Trunk(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            AIMv2Block(c) for _ in range(c["num_hidden_layers"])
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class AIMv2(nn.Module):
    """AIMv2 tower: pixels [n, 3, side, side] -> features [n, patches, width]."""

    unused = ("trunk.post_trunk_norm.",)

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.preprocessor = AIMv2Preprocessor(c)
        self.trunk = AIMv2Trunk(c)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.trunk(self.preprocessor(pixels))


class SigLIPAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.out_proj(attend(q, k, v, self.heads))


class GeluMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class SigLIPLayer(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        width, eps = c["hidden_size"], c["layer_norm_eps"]
        self.layer_norm1 = nn.LayerNorm(width, eps)
        self.self_attn = SigLIPAttention(width, c["num_attention_heads"])
        self.layer_norm2 = nn.LayerNorm(width, eps)
        self.mlp = GeluMLP(width, c["intermediate_size"])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class SigLIPEmbeddings(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        width, patch = c["hidden_size"], c["patch_size"]
        tokens = (c["image_size"] // patch) ** 2
        self.patch_embedding = nn.Conv2d(c["num_channels"], width, patch, stride=patch)
        self.position_embedding = nn.Embedding(tokens, width)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = self.patch_embedding(pixels).flatten(2).transpose(1, 2)
        return patches + self.position_embedding.weight


class SigLIPEncoder(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            SigLIPLayer(c) for _ in range(c["num_hidden_layers"])
        )


class SigLIPVision(nn.Module):
    def __init__(self, c: dict) -> None:
        super().__init__()
        self.embeddings = SigLIPEmbeddings(c)
        self.encoder = SigLIPEncoder(c)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embeddings(pixels)
        for layer in self.encoder.layers:
            x = layer(x)
        return x


class SigLIP(nn.Module):
    """SigLIP tower: pixels [n, 3, side, side] -> features [n, patches, width]."""

    unused = ("vision_model.post_layernorm.", "vision_model.head.")

    def __init__(self, c: dict) -> None:
        super().__init__()
        self.vision_model = SigLIPVision(c)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.vision_model(pixels)


TOWERS: dict[str, type[AIMv2] | type[SigLIP]] = {
    "aimv2_visual_tokenizer": AIMv2,
    "siglip_visual_tokenizer": SigLIP,
}
