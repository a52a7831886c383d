# device: cuda. One key, or one query, in f16: XLA's implementation under jit, beside itself without.
import jax
import jax.numpy as jnp

attention = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="xla")
for queries, keys in ((17, 2), (17, 1), (1, 2)):
    q = jax.random.normal(jax.random.key(0), (1, queries, 3, 16), jnp.float16)
    k, v = jax.random.normal(jax.random.key(1), (2, 1, keys, 3, 16), jnp.float16)
    for name, function in (("without jit", attention), ("jit", jax.jit(attention))):
        try:
            found = "finite" if jnp.isfinite(function(q, k, v)).all() else "not finite"
        except jax.errors.JaxRuntimeError as error:
            found = str(error).splitlines()[0]
        print(f"{queries} queries, {keys} keys, {name}: {found}")
