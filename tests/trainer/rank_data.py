"""What the ranks of rank_scene.py work with: a model of odd sizes, sequences, and how they are dealt."""

from pathlib import Path

import torch

from shared.model import hf
from shared.model.decoder import Decoder, DecoderConfig, initialise
from shared.sections import RewardWeights
from shared.types import MicroBatch, Reward, TrainSequence, Verdict
from tests.trainer.sequences import make_sequence
from trainer.objectives.advantage import advantages, token_weights
from trainer.objectives.registry import read_objective

MAGISTRAL = read_objective({})
# odd sizes: no dimension splits evenly, and key rows (2) and head norms (2) leave ranks of four without any
SHAPE = DecoderConfig(
    family="qwen3", vocab_size=67, hidden_size=25, intermediate_size=45, layers=2, heads=3, key_heads=1, head_dim=2,
    norm_epsilon=1e-5, max_positions=256, tied=True, qk_norm=True, initializer_range=0.15,
)  # fmt: skip


def make_sequences(loss_aggregation: str) -> list[TrainSequence]:
    """4 groups of 8 completions of very different lengths, off-policy log-probs, one masked completion.

    Completions of a group share their prompt, which packing stores once wherever they meet."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 30, (4, 8), generator=draw).tolist()
    lengths[0][0], lengths[3][7] = 60, 0
    rewards = torch.rand(4, 8, generator=draw).round(decimals=1).tolist()
    rewards[3][7] = None
    graded = [[None if value is None else Reward(value, 0, 0, 0, 0, Verdict.WRONG) for value in row] for row in rewards]
    values = advantages(graded, MAGISTRAL.advantage, RewardWeights())
    weights = token_weights(lengths, loss_aggregation, 30)  # type: ignore[arg-type]
    prompts = torch.randint(0, 67, (4, 5), generator=draw).tolist()
    return [
        make_sequence(
            prompts[group] + torch.randint(0, 67, (count,), generator=draw).tolist(),
            5,
            (-4 - torch.rand(count, generator=draw)).tolist(),
            values[group][sample] or 0.0,
            weights[group][sample],
            group=group,
        )
        for group in range(4)
        for sample, count in enumerate(lengths[group])
        if count
    ]


def deal(sequences: list[TrainSequence], count: int, rank: int, world: int) -> list[MicroBatch]:
    """Cut into `count` micro-batches and deal them to ranks in turn, dummies at the end."""
    batches = [MicroBatch(sequences[start::count]) for start in range(count)]
    rounds = -(-count // world)
    batches += [MicroBatch([]) for _ in range(rounds * world - count)]
    return batches[rank::world]


def make_folder(folder: Path, seed: int) -> None:
    """A Hugging Face folder of the scene's model, with a stand-in for a tokenizer."""
    whole = Decoder(SHAPE)
    initialise(whole, seed)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": SHAPE.vocab_size, "hidden_size": SHAPE.hidden_size,
        "intermediate_size": SHAPE.intermediate_size, "num_hidden_layers": SHAPE.layers,
        "num_attention_heads": SHAPE.heads, "num_key_value_heads": SHAPE.key_heads, "head_dim": SHAPE.head_dim,
        "rms_norm_eps": SHAPE.norm_epsilon, "max_position_embeddings": SHAPE.max_positions,
        "tie_word_embeddings": True,
    }  # fmt: skip
    hf.save_model(folder, config, dict(whole.named_parameters()), torch.float32)
    (folder / "tokenizer.json").write_text("{}")
