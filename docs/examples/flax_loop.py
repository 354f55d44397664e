"""A training loop that is not jaxthd's: a Flax model and optax, on rows that jaxthd's grain plugin packs.

python docs/examples/flax_loop.py
"""

import grain
import optax
from flax import nnx

import jaxthd

TEXTS = [f"{n} and {n} is {2 * n}" for n in range(1, 200)]


class Model(nnx.Module):
    """One causal attention layer over bytes. No document sees another one: their segment ids differ."""

    def __init__(self, dim: int, rngs: nnx.Rngs) -> None:
        self.token, self.position = nnx.Embed(256, dim, rngs=rngs), nnx.Embed(32, dim, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, dim, decode=False, rngs=rngs)
        self.head = nnx.Linear(dim, 256, rngs=rngs)

    def __call__(self, batch: jaxthd.Batch):
        ids, x = batch.segment_ids, self.token(batch.tokens) + self.position(batch.positions)
        mask = nnx.combine_masks(nnx.make_causal_mask(ids), ids[:, None, :, None] == ids[:, None, None, :])
        return self.head(x + self.attention(x, mask=mask))


def loss(model: Model, batch: jaxthd.Batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch), batch.targets)
    return (batch.weights * losses).sum() / batch.weights.sum()


@nnx.jit
def step(model: Model, optimizer: nnx.Optimizer, batch: jaxthd.Batch):
    value, gradients = nnx.value_and_grad(loss)(model, batch)
    optimizer.update(model, gradients)
    return value


def document(text: str) -> jaxthd.Document:
    return jaxthd.Document.splice(text, list(text.encode()), [True] * len(text), clips=[], placeholder=-1)


def train(steps: int = 100) -> list[float]:
    pack = jaxthd.PackDocuments(capacity=128, audio_capacity=0, max_documents=16)
    documents = grain.MapDataset.source(TEXTS).shuffle(seed=0).repeat().map(document)
    batches = iter(documents.pipe(pack).map(lambda row: row.batch).batch(4))  # tokens int32 [4, 128]
    model = Model(64, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    return [float(step(model, optimizer, next(batches))) for _ in range(steps)]


if __name__ == "__main__":
    losses = train()
    print(f"loss {losses[0]:.2f} at first, {losses[-1]:.2f} after {len(losses)} steps")
