"""AdamW for every weight, or Muon for the matrices inside the Transformer and AdamW for the rest."""

import torch
from torch import nn


def adamw(parameters: list[nn.Parameter], lr: float, **settings) -> torch.optim.AdamW:
    """One kernel for all weights, on any device."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True, **settings)


class Muon(torch.optim.Optimizer):
    """Matrices move by their momentum made orthogonal (Jordan et al. 2024), all other weights as AdamW moves them.

    `match_rms_adamw` scales a matrix's update to the size of AdamW's (Liu et al. 2025), so that one rate serves both.
    """

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter], lr: float):
        muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
        self.parts = [muon, adamw(others, lr)]
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part, groups in zip(self.parts, (self.param_groups[:1], self.param_groups[1:])):
            part.param_groups = groups  # the same dictionaries: a rate set here is theirs
        self.found_inf = None  # what the fused AdamW reads: 1 skips the update

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update every weight from its gradient."""
        muon, rest = self.parts
        rest.found_inf = self.found_inf
        rest.step()
        if self.found_inf is None or not self.found_inf.item():
            muon.step()

    def state_dict(self) -> dict:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict) -> None:
        for part, saved in zip(self.parts, state["parts"]):
            part.load_state_dict(saved)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
