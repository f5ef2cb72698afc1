"""A trained model in one piece, for tests that compare with it: no rank of a run ever holds one."""

from pathlib import Path

import torch

from shared.model import hf
from shared.model.implementation import make_model, read_shape
from shared.model.language_model import LanguageModel


def load_model(folder: Path, implementation: str = "auto") -> LanguageModel:
    """Return a model with the folder's weights, float32. Raises ModelError for everything that does not fit."""
    config = hf.load_config(folder)
    with torch.device("meta"):
        model = make_model(read_shape(config, implementation), config)
    shapes = {name: tensor.shape for name, tensor in model.stored()}
    model.to_empty(device="cpu")
    model.settle_buffers()
    # a copy, so that nothing keeps the file mapped (it may be replaced while the model lives)
    state = {name: tensor.to(torch.float32, copy=True) for name, tensor in hf.iterate_weights(folder, shapes)}
    model.load_state_dict(state, strict=True, assign=True)
    return model.requires_grad_(True)
