# device: cpu. NaN in a token that is ignored: the loss with and without options, which are documented as equivalent.
import torch

torch.manual_seed(0)
h, w, targets = torch.randn(4, 8), torch.randn(5, 8), torch.tensor([0, 1, 2, -100])
h[3] = torch.nan
print("cross_entropy:", torch.nn.functional.cross_entropy(h @ w.T, targets).item())
for options in (None, torch.nn.LinearCrossEntropyOptions()):
    loss = torch.nn.functional.linear_cross_entropy(h, w, targets, options=options)
    print(f"options={type(options).__name__}:", loss.item())
