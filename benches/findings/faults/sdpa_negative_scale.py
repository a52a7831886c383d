# device: cpu, cuda. Scales of 0 and below: rows of fused backends against the docstring's own formula.
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
q, k, v = (torch.randn(1, 1, 4, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
hidden = ~torch.ones(4, 4, device=device).tril().bool()
for scale, causal in ((-0.3, True), (0.0, True), (0.0, False)):
    scores = (q.double() @ k.double().mT * scale).masked_fill(hidden & causal, -torch.inf)
    exact = torch.softmax(scores, -1) @ v.double()
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, *[SDPBackend.CUDNN_ATTENTION] * (device == "cuda")):
        with sdpa_kernel([backend]):
            o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        off = (o.double() - exact).abs().max().item()
        print(f"{backend.name}, scale {scale}, causal {causal}: off by at most {off}")
