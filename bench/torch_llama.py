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


class Fp8Product(torch.autograd.Function):
    """x weight^T in fp8, each tensor scaled by its largest number: e4m3 forward, gradients in e5m2."""

    @staticmethod
    def scaled(x, dtype):
        scale = torch.finfo(dtype).max / x.abs().amax().float().clamp(min=1e-12)
        return (x * scale).to(dtype), scale.reciprocal()

    @staticmethod
    def forward(ctx, x, weight):
        x8, x_scale = Fp8Product.scaled(x.flatten(0, -2), torch.float8_e4m3fn)
        w8, w_scale = Fp8Product.scaled(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        out = torch._scaled_mm(x8, w8.t(), x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=True)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, d_out):
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        d8, d_scale = Fp8Product.scaled(d_out.flatten(0, -2), torch.float8_e5m2)
        d_x = torch._scaled_mm(d8, w8.t().contiguous().t(), d_scale, w_scale, out_dtype=torch.bfloat16)
        d_weight = torch._scaled_mm(d8.t().contiguous(), x8.t().contiguous().t(), d_scale, x_scale, out_dtype=torch.bfloat16)
        return d_x.view(*d_out.shape[:-1], -1), d_weight


class Fp8Linear(nn.Linear):
    def forward(self, x):
        return Fp8Product.apply(x.bfloat16(), self.weight.bfloat16())


class Block(nn.Module):
    def __init__(self, shape, linear=nn.Linear):
        super().__init__()
        self.shape, d = shape, shape.hidden // shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden, eps=1e-5), nn.RMSNorm(shape.hidden, eps=1e-5)
        self.qkv = linear(shape.hidden, (shape.heads + 2 * shape.groups) * d, bias=False)
        self.proj = linear(shape.heads * d, shape.hidden, bias=False)
        self.fc1, self.fc2 = linear(shape.hidden, 2 * shape.ffn, bias=False), linear(shape.ffn, shape.hidden, bias=False)

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

    def __init__(self, shape, layers, seq, linear=nn.Linear):
        super().__init__()
        self.shape, self.seq = shape, seq
        self.wte, self.output = nn.Embedding(shape.vocab, shape.hidden), Output(shape)
        self.blocks = nn.ModuleList(Block(shape, linear) for _ in range(layers))
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
