"""How often the loops of a step turn that the data bounds, from a batch."""

from typing import Any

import numpy as np

from jaxthd.config import Config
from jaxthd.packing.batch import Batch
from jaxthd.packing.segments import make_segments


def expected_trips(config: Config, batch: Batch) -> dict[str, float]:
    """Trips of an entry of the loops that the data bounds, by part of the model. Experts: of an even load."""
    compute, llm, block = config.compute, config.model.llm, config.compute.attention_block

    def of_blocks(ids: Any, positions: Any, field: str) -> float:
        segments = make_segments(ids, positions, block=block, axis=None)
        return float(np.diff(np.asarray(getattr(segments, field).blocks)).mean())

    supervised = float((np.asarray(batch.weights) > 0).sum())
    assigned = float((np.asarray(batch.segment_ids) > 0).sum()) * llm.experts_per_token
    found = {
        "attention": of_blocks(batch.segment_ids, batch.positions, "local"),
        "head": -(-supervised // (config.mesh.context * compute.loss_block)),
        "experts": assigned / compute.expert_block + llm.experts / 2,
    }
    if compute.expert_products == "rounds":
        found["experts"] = 1.0
    if config.model.encoder is not None:
        found["encoder attention"] = of_blocks(batch.chunk_ids, batch.chunk_positions, "whole")
    return found
