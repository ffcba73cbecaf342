"""The Llama of the peers written in PyTorch."""
import collections

import torch
from torch import nn
from torch.nn import functional as F

Shape = collections.namedtuple("Shape", "hidden heads groups ffn vocab")
LLAMA_8B = Shape(hidden=4096, heads=32, groups=8, ffn=14336, vocab=128256)


def angles(shape, seq):
    """Cosines and sines of rotary positions."""
    d = shape.hidden // shape.heads
    angle = torch.outer(torch.arange(seq).float(), 500000.0 ** (-torch.arange(0, d, 2).float() / d))
    return angle.cos().bfloat16(), angle.sin().bfloat16()


def turn(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attention(qkv, n_heads, n_groups, cos, sin):
    """qkv: [batch, seq, (heads + 2 groups) channels]; the result has the heads' channels."""
    b, s, wide = qkv.shape
    d = wide // (n_heads + 2 * n_groups)
    q, k, v = qkv.split((n_heads * d, n_groups * d, n_groups * d), dim=-1)
    q, k, v = (t.view(b, s, -1, d).transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).reshape(b, s, n_heads * d)


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape, d = shape, shape.hidden // shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden, eps=1e-5), nn.RMSNorm(shape.hidden, eps=1e-5)
        self.qkv = nn.Linear(shape.hidden, (shape.heads + 2 * shape.groups) * d, bias=False)
        self.proj = nn.Linear(shape.heads * d, shape.hidden, bias=False)
        self.fc1, self.fc2 = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False), nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x, cos, sin):
        x = x + self.proj(attention(self.qkv(self.norm1(x)), self.shape.heads, self.shape.groups, cos, sin))
        gate, up = self.fc1(self.norm2(x)).chunk(2, dim=-1)
        return x + self.fc2(F.silu(gate) * up)


class Output(nn.Module):
    """The last norm, the output layer and the loss."""

    def __init__(self, shape):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(shape.hidden, eps=1e-5), nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, x, labels):
        return F.cross_entropy(self.linear(self.norm(x)).flatten(0, 1), labels.reshape(-1))


class Llama(nn.Module):
    """forward() gives the loss."""

    def __init__(self, shape, layers, seq):
        super().__init__()
        self.shape, self.seq = shape, seq
        self.wte, self.output = nn.Embedding(shape.vocab, shape.hidden), Output(shape)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(layers))
        cos, sin = angles(shape, seq)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.draw()

    @torch.no_grad()
    def draw(self):
        """Weights and tables anew, where they lie."""
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)
            else:
                nn.init.ones_(p)
        for mine, table in zip((self.cos, self.sin), angles(self.shape, self.seq)):
            mine.copy_(table)

    def forward(self, tokens, labels):
        x = self.wte(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.output(x, labels)
