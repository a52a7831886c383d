# device: cpu, cuda. A causal mask and a negative scale: rows of the flash backend against the docstring's own formula.
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
q, k, v = (torch.randn(1, 1, 4, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
scores = q.double() @ k.double().mT * -0.3
exact = torch.softmax(scores.masked_fill(~torch.ones(4, 4, device=device).tril().bool(), -torch.inf), -1) @ v.double()
for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
    with sdpa_kernel([backend]):
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=-0.3)
    print(backend.name, "is off by at most", (o.double() - exact).abs().max().item())
