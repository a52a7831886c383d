# device: cuda. Scales of 0 and below under a causal mask: cuDNN's implementation beside XLA's, of one function.
import jax
import jax.numpy as jnp

q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 4, 1, 64), jnp.bfloat16)
for scale in (-0.3, 0.0):
    for implementation in ("xla", "cudnn"):
        o = jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True, implementation=implementation)
        print(f"{implementation}, scale {scale}: o is {'finite' if jnp.isfinite(o).all() else 'not finite'}")
