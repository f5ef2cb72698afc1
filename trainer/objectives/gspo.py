"""GSPO: one clipped ratio for a whole completion, the geometric mean of its tokens' (arXiv 2507.18071).

name          ratio of a token
gspo          s = exp(mean_t log r_t) of its completion          equation 7
gspo_token    sg(s) pi_t / sg(pi_t)                              equation 14: the same value, each token's gradient

As in the paper the ratio divides by the policy at the start of the batch (`old`), of which the bounds 3e-4 and 4e-4 are
a small step: the rounding of an engine in bfloat16 is larger. Tokens are weighed by that policy against the engine's,
truncated at 2. Both are 1 where the engine has the same weights and rounding.

In an environment each turn is a completion in this sense: it has a ratio of its own, and with environment.credit =
"turn" an advantage of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.objectives.clip import ClippedRatio
from trainer.objectives.inputs import LossInputs
from trainer.objectives.registry import publish

if TYPE_CHECKING:
    from torch import Tensor


class Gspo(ClippedRatio):
    """The clipped objective with the geometric mean of a completion's ratios for each of its tokens."""

    def ratios(self, inputs: LossInputs) -> Tensor:
        """[loss_tokens] s of each token's turn, with gradients."""
        completions = inputs.completions
        return completions.turn_means(self.log_ratios(inputs)).exp()[completions.turn]


class GspoToken(Gspo):
    """The value of GSPO, with each token's own gradient."""

    def ratios(self, inputs: LossInputs) -> Tensor:
        """[loss_tokens] sg(s) pi_t / sg(pi_t)."""
        return super().ratios(inputs).detach() * (inputs.logprobs - inputs.logprobs.detach()).exp()


for name, kind, equation in (("gspo", Gspo, 7), ("gspo_token", GspoToken, 14)):
    publish(
        name, kind, f"arXiv 2507.18071, equation {equation}", clip_low=3e-4, clip_high=4e-4,
        ratio_reference={"kind": "old", "importance": {"kind": "token_truncated"}},
        advantage={"scale": "group"}, loss_aggregation="sequence", filter_groups_by="off",
    )  # fmt: skip
